// What the library gives to Python besides the operators that Paddle registers.
#pragma once

extern "C" {

// A new tuple, of type PyObject*, of two dictionaries of functions by their names: one for each operator, which runs it
// without Paddle's call of custom operators; and those that answer in one call what is asked of each tensor. Both
// are empty where Paddle does not have the names that this needs. The caller holds the GIL.
void* paddle_kv_python_functions();
}
