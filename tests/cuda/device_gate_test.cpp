// SPDX-License-Identifier: Apache-2.0
// The mutually exclusive sections of a process whose ranks share a GPU. Needs no GPU.
#include "cuda/runtime/device_gate.hpp"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "support/catch.hpp"

using namespace std::chrono_literals;
using helix::cuda::DeviceGate;

TEST_CASE("sections of one kind go side by side, and a thread inside of one enters the other") {
  const DeviceGate::Queueing queueing;
  std::atomic<bool> is_beside = false;
  std::jthread other([&] {
    const DeviceGate::Queueing beside;
    const DeviceGate::Waiting inside;
    is_beside = true;
  });
  other.join();
  CHECK(is_beside);
}

TEST_CASE("what waits for a device and what queues are never both under way") {
  constexpr int kRounds = 2000;
  std::atomic<int> queueing = 0;
  std::atomic<int> waiting = 0;
  std::atomic<int> together = 0;
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        for (int round = 0; round < kRounds; ++round) {
          if (i % 2 == 0) {
            const DeviceGate::Queueing section;
            ++queueing;
            together += waiting;
            --queueing;
          } else {
            const DeviceGate::Waiting section;
            ++waiting;
            together += queueing;
            --waiting;
          }
        }
      });
    }
  }
  CHECK(together == 0);
}

TEST_CASE("neither kind of section starves where both are always wanted") {
  constexpr int kRounds = 300;
  std::atomic<int> left = 4;
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        for (int round = 0; round < kRounds || left > 0; ++round) {
          if (round == kRounds) --left;
          if (i % 2 == 0) {
            DeviceGate::let_waits_begin();
            const DeviceGate::Queueing section;
            std::this_thread::sleep_for(10us);
          } else {
            const DeviceGate::Waiting section;
            std::this_thread::sleep_for(10us);
          }
        }
      });
    }
  }
  CHECK(left == 0);  // a starved kind would never finish
}
