// Keeps the handlers of signals away from a call, so that what they raise leaves nothing half done.
#pragma once

extern "C" {

// A new dictionary, of type PyObject*. The caller holds the GIL.
//
//   undisturbed(function) -> what function() returns
//       In the main thread alone. Python runs handlers there, between any two of its instructions. Those that it would
//       run during the function are run behind it, once for each signal, as Python does for signals that come together;
//       what one of them raises is raised instead of the result. The actions of the signals themselves, which may be
//       those of another library, and their flags stay as they are. Meanwhile signal.getsignal, asked by another
//       thread, tells of a stand-in.
//
//   put_back()
//       In a child that was forked by another thread than the main one, whose function the child lacks: its handlers.
void* paddle_kv_signal_functions();
}
