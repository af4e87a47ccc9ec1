// SPDX-License-Identifier: Apache-2.0
// cuda::NcclComm frees each communicator that NCCL has created, even if creating its handle fails. NCCL
// itself is not linked: this file defines its functions, which count calls.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include <nccl.h>

#include <helix/contract/catch.hpp>
#include <helix/cuda/nccl_comm.hpp>
#include <helix/error.hpp>

#include "cuda/gpu.hpp"

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using helix::Error;
using helix::cuda::NcclComm;

/// Stands in for a communicator.
struct ncclComm {
  int rank = 0;
  int size = 1;
};

namespace {

std::atomic<int> num_alive = 0;
std::atomic<int> num_made = 0;
std::atomic<bool> is_slow = false;    // creating a communicator takes longer than the group's timeout
std::atomic<bool> is_unsure = false;  // no communicator knows its rank

ncclResult_t make(ncclComm_t* comm, int size, int rank) {
  if (is_slow) std::this_thread::sleep_for(600ms);
  *comm = new ncclComm{rank, size};
  ++num_alive;
  ++num_made;
  return ncclSuccess;
}

ncclResult_t free_one(ncclComm_t comm) {
  delete comm;
  --num_alive;
  return ncclSuccess;
}

const std::vector<int> kDevice{0};

/// Checks that a group whose communicators do not know their ranks is refused, and that all are freed.
void check_unsure(const std::vector<int>& devices) {
  num_made = 0;
  is_unsure = true;
  CHECK_THROWS_WITH(NcclComm::create_group(devices), ContainsSubstring("ncclCommUserRank"));
  is_unsure = false;
  CHECK(num_made == static_cast<int>(devices.size()));
  CHECK(num_alive == 0);
}

}  // namespace

ncclResult_t ncclGetUniqueId(ncclUniqueId*) {
  return ncclSuccess;
}
ncclResult_t ncclGroupStart() {
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId, int rank) {
  return make(comm, size, rank);
}
ncclResult_t ncclCommSplit(ncclComm_t, int, int, ncclComm_t* comm, ncclConfig_t*) {
  return make(comm, 1, 0);
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return is_unsure ? ncclInternalError : ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->size;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t, int* device) {
  *device = 0;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return free_one(comm);
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return free_one(comm);
}

TEST_CASE("communicators are freed once, of a group and of a part") {
  HELIX_REQUIRE_GPUS(1);
  num_made = 0;
  {
    std::vector<NcclComm> comms = NcclComm::create_group(kDevice);
    const NcclComm part = comms.front().split(0, 0);
    CHECK(num_alive == 2);
  }
  CHECK(num_made == 2);
  CHECK(num_alive == 0);
}

TEST_CASE("a communicator whose handle cannot be made is freed") {
  HELIX_REQUIRE_GPUS(1);
  check_unsure(kDevice);
}

TEST_CASE("all communicators of a group are freed where the first one's handle cannot be made") {
  HELIX_REQUIRE_GPUS(2);
  check_unsure({0, 1});
}

TEST_CASE("a communicator that comes after its caller has given up is freed") {
  HELIX_REQUIRE_GPUS(1);
  num_made = 0;
  is_slow = true;
  CHECK_THROWS_WITH(NcclComm::create_group(kDevice, 200ms), ContainsSubstring("did not connect"));
  for (int i = 0; i < 500 && (num_made == 0 || num_alive != 0); ++i) std::this_thread::sleep_for(10ms);
  is_slow = false;
  CHECK(num_made == 1);
  CHECK(num_alive == 0);
}
