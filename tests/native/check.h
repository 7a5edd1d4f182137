// A test is a function; a check that fails says where and ends the process.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                                \
    }                                                                               \
  } while (0)

struct Test {
  const char* name;
  void (*run)();
};

// Without an argument all of them, else the one of that name.
template <int kCount>
int RunTests(const Test (&tests)[kCount], int argc, char** argv) {
  int ran = 0;
  for (const Test& test : tests) {
    if (argc > 1 && std::string(argv[1]) != test.name) continue;
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    test.run();
    ++ran;
  }
  return ran == 0;
}
