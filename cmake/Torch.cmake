# Imported targets for LibTorch out of an installed Python torch. find_package(Torch) is avoided: for a CUDA wheel it
# demands a full CUDA toolkit even where only the CPU part is used.
#   torch::headers  include folders only
#   torch::torch    headers, libc10, libtorch_cpu
include_guard(GLOBAL)

set(NSA_PYTHON "" CACHE FILEPATH "Python interpreter whose torch is used; default .venv/bin/python, then python3")
if(NOT NSA_PYTHON)
  if(SKBUILD)  # pip's own environment decides
    set(NSA_PYTHON ${Python_EXECUTABLE})
  elseif(EXISTS ${PROJECT_SOURCE_DIR}/.venv/bin/python)
    set(NSA_PYTHON ${PROJECT_SOURCE_DIR}/.venv/bin/python)
  else()
    find_program(NSA_PYTHON python3 REQUIRED)
  endif()
endif()
execute_process(  # in a folder of this tree: Python imports from the folder that it starts in
  COMMAND ${NSA_PYTHON} -c "import importlib.util as u, os; print(os.path.dirname(u.find_spec('torch').origin))"
  WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
  OUTPUT_VARIABLE NSA_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE _failed ERROR_QUIET)
if(_failed)
  message(FATAL_ERROR "no torch for ${NSA_PYTHON}: `make build` installs one into .venv, or set -DNSA_PYTHON=")
endif()
message(STATUS "torch: ${NSA_TORCH_DIR}")

add_library(torch_headers INTERFACE)
add_library(torch::headers ALIAS torch_headers)
target_include_directories(torch_headers SYSTEM INTERFACE
  ${NSA_TORCH_DIR}/include ${NSA_TORCH_DIR}/include/torch/csrc/api/include)

foreach(_lib c10 torch_cpu)
  add_library(torch_${_lib} SHARED IMPORTED)
  set_target_properties(torch_${_lib} PROPERTIES IMPORTED_LOCATION ${NSA_TORCH_DIR}/lib/lib${_lib}.so)
endforeach()
add_library(torch_torch INTERFACE)
add_library(torch::torch ALIAS torch_torch)
target_link_libraries(torch_torch INTERFACE torch_headers torch_torch_cpu torch_c10)
