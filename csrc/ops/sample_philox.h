// Philox4x32-10, a counter-based random number generator (Salmon, Moraes, Dror, Shaw, "Parallel
// random numbers: as easy as 1, 2, 3", SC 2011): the numbers are a pure function of key and counter.
#pragma once
#include <cstdint>

namespace twostep {

struct Philox {
  uint32_t word[4];

  Philox(const uint32_t counter[4], const uint32_t key[2]) {
    uint32_t k0 = key[0], k1 = key[1];
    for (int i = 0; i < 4; i++) word[i] = counter[i];
    for (int round = 0; round < 10; round++) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * word[0];
      const uint64_t p1 = uint64_t{0xCD9E8D57u} * word[2];
      const uint32_t next[4] = {static_cast<uint32_t>(p1 >> 32) ^ word[1] ^ k0, static_cast<uint32_t>(p1),
                                static_cast<uint32_t>(p0 >> 32) ^ word[3] ^ k1, static_cast<uint32_t>(p0)};
      for (int i = 0; i < 4; i++) word[i] = next[i];
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
  }
};

// 64 uniform bits for the token at `position` of the request with this seed.
inline uint64_t uniform_bits(uint64_t seed, int position) {
  const uint32_t counter[4] = {static_cast<uint32_t>(position), 0, 0, 0};
  const uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  const Philox random(counter, key);
  return random.word[0] | static_cast<uint64_t>(random.word[1]) << 32;
}

// bits / 2^64 of `total`, rounded down: uniform in 0 .. total - 1.
inline uint64_t uniform_below(uint64_t total, uint64_t bits) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(bits) * total >> 64);
}

}  // namespace twostep
