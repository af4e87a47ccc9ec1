// SPDX-License-Identifier: Apache-2.0
// Compiles and links against helix::cuda alone, which must bring helix::core, the CUDA runtime, cuBLASLt and
// NCCL. The program must start without a GPU or a driver.
#include <cstdio>

#include <helix/backend.hpp>
#include <helix/cuda/backend.hpp>
#include <helix/cuda/graph.hpp>
#include <helix/cuda/nccl_comm.hpp>

int main() {
  using helix::bf16;
  namespace cuda = helix::cuda;
  static_assert(helix::Backend<cuda::Backend<cuda::LocalComm, float>>);
  static_assert(helix::Backend<cuda::Backend<cuda::NcclComm, bf16>>);
  try {
    const cuda::Operators<bf16> operators;
    std::printf("device %d of %d\n", operators.device(), cuda::device_count());
    return 0;
  } catch (const helix::Error& error) {
    std::printf("%s\n", error.what());
    return cuda::device_count() == 0 ? 0 : 1;
  }
}
