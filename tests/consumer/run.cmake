# cmake -DNSA_BUILD=<build folder> -DWORK=<scratch folder> -P run.cmake
# Installs the library into WORK, builds the consumer against it, runs it, and sees that neither needs torch.
function(step)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE failed OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(failed)
    message(FATAL_ERROR "${ARGV}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK})
step(${CMAKE_COMMAND} --install ${NSA_BUILD} --prefix ${WORK}/prefix --component library)
step(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR} -B ${WORK}/build -DCMAKE_PREFIX_PATH=${WORK}/prefix
  -DCMAKE_BUILD_TYPE=Release)
step(${CMAKE_COMMAND} --build ${WORK}/build)
step(${WORK}/build/consumer)
message(STATUS "${output}")
step(ldd ${WORK}/build/consumer)
if(output MATCHES "torch|libc10")
  message(FATAL_ERROR "libnsa depends on torch:\n${output}")
endif()
