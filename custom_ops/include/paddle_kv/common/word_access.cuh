// Loads and stores of whole words; streaming: used once, so that they leave the cache to others.
#pragma once

#include <cstdint>

namespace paddle_kv {

template <int kBytes>
struct WordOf;
template <>
struct WordOf<1> {
  using Type = unsigned char;
};
template <>
struct WordOf<2> {
  using Type = unsigned short;
};
template <>
struct WordOf<4> {
  using Type = unsigned int;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
template <>
struct WordOf<16> {
  using Type = uint4;
};

// `Value` has 1, 2, 4, 8 or 16 bytes, and the address is a multiple of that. So for all functions here.
template <class Value>
__device__ inline Value LoadStreaming(const void* address) {
  using Word = typename WordOf<sizeof(Value)>::Type;
  const Word word = __ldcs(static_cast<const Word*>(address));
  Value value;
  memcpy(&value, &word, sizeof(value));
  return value;
}

template <class Value>
__device__ inline void StoreStreaming(void* address, const Value& value) {
  using Word = typename WordOf<sizeof(Value)>::Type;
  Word word;
  memcpy(&word, &value, sizeof(word));
  __stcs(static_cast<Word*>(address), word);
}

template <class Value>
__device__ inline Value Load(const void* address) {
  using Word = typename WordOf<sizeof(Value)>::Type;
  const Word word = *static_cast<const Word*>(address);
  Value value;
  memcpy(&value, &word, sizeof(value));
  return value;
}

template <class Value>
__device__ inline void Store(void* address, const Value& value) {
  using Word = typename WordOf<sizeof(Value)>::Type;
  Word word;
  memcpy(&word, &value, sizeof(word));
  *static_cast<Word*>(address) = word;
}

// These two stay where they stand, and without a branch: a compiler moves a load whose word is stored under a condition
// behind that condition, and one trip to memory then waits for the other.
__device__ inline uint4 LoadNow(const std::uint8_t* address) {
  uint4 word;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(address)
               : "memory");
  return word;
}

__device__ inline void StoreIf(bool condition, std::uint8_t* address, const uint4& word) {
  asm volatile(
      "{\n"
      ".reg .pred holds;\n"
      "setp.ne.u32 holds, %0, 0;\n"
      "@holds st.global.v4.u32 [%1], {%2, %3, %4, %5};\n"
      "}" ::"r"(static_cast<unsigned>(condition)),
      "l"(address), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
      : "memory");
}

// The same bits as another type of the same size. What is loaded before it is used should be held as a word: a struct
// of small elements may be taken apart where it is loaded, and one load then waits for the other.
template <class Value, class Word>
__device__ inline Value FromWord(const Word& word) {
  static_assert(sizeof(Value) == sizeof(Word));
  Value value;
  memcpy(&value, &word, sizeof(value));
  return value;
}

}  // namespace paddle_kv
