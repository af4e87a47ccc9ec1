# SPDX-License-Identifier: Apache-2.0
# Installs the package and builds examples/torch against it with the Python of HELIX_TORCH_PYTHON, or python3, if it can import torch.
# Compares its operators with their definitions on 1 and on 2 ranks, in two layouts, and checks their error messages.
include("${CMAKE_CURRENT_LIST_DIR}/build_consumer.cmake")
set(python "$ENV{HELIX_TORCH_PYTHON}")
if(NOT python)
  set(python python3)
endif()
execute_process(COMMAND "${python}" -c "import torch, torch.distributed as dist; print(torch.__version__); assert dist.is_gloo_available()"
                RESULT_VARIABLE status OUTPUT_VARIABLE version ERROR_VARIABLE complaint OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT status EQUAL 0)
  if(DEFINED ENV{HELIX_TORCH_PYTHON})
    message("${complaint}")
    message(FATAL_ERROR "HELIX_TORCH_PYTHON is ${python}, which does not import torch with gloo")
  endif()
  message("SKIPPED: ${python} does not import torch with gloo; set HELIX_TORCH_PYTHON to one that does")
  return()
endif()
execute_process(COMMAND "${python}" -c "import sys; print(sys.executable)" OUTPUT_VARIABLE python OUTPUT_STRIP_TRAILING_WHITESPACE)

set(work "${WORK_DIR}/torch")
file(REMOVE_RECURSE "${work}")
helix_run("${CMAKE_COMMAND}" --install "${BUILD_DIR}" --config "${CONFIG}" --prefix "${work}/prefix")
helix_build_consumer("${SOURCE_DIR}/examples/torch" "${work}/build" "-DCMAKE_PREFIX_PATH=${work}/prefix" "-DPython3_EXECUTABLE=${python}"
                     -DCMAKE_CXX_FLAGS=-Werror -DCMAKE_BUILD_TYPE=Release)
set(library "${work}/build/helix_torch.so")

# One thread per rank, as torchrun sets it.
set(ENV{OMP_NUM_THREADS} 1)
set(script "${SOURCE_DIR}/examples/torch/attention.py" "${library}" --device cpu --repeat 3)
set(ranks "${python}" -m torch.distributed.run --standalone --nproc-per-node 2)
set(small --context 333 --sequences 3 --queries 2 --layout HND --block-first --interleave 3 --block-size 8 --head-dim 64)
helix_run("${python}" ${script})
message("${output}")
helix_run("${python}" ${script} ${small})
helix_run(${ranks} ${script})
message("${output}")
helix_run(${ranks} ${script} ${small})
helix_run(${ranks} "${CMAKE_CURRENT_LIST_DIR}/torch_mistakes.py" "${library}")
message("torch ${version}")

# The same on the available GPUs.
if(CUDA_BUILT)
  helix_run("${python}" -c "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)")
  string(REGEX MATCH "([0-9]+)\n*$" gpus "${output}")
  set(gpus "${CMAKE_MATCH_1}")
  foreach(count IN ITEMS 1 2)
    if(gpus GREATER_EQUAL count)
      helix_run("${python}" -m torch.distributed.run --standalone --nproc-per-node ${count}
                "${SOURCE_DIR}/examples/torch/attention.py" "${library}" --device cuda)
      message("${output}")
    endif()
  endforeach()
endif()
