# cmake -DNSA_BUILD=<build folder> -DWORK=<scratch folder> -DCXX=<compiler> -P run.cmake
# Installs the library into WORK, builds the consumer against it by find_package and by pkg-config, runs it, and sees
# that neither needs torch. As a subproject only the consumer's file is compiled, not the library another time.
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
  -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_BUILD_TYPE=Release)
step(${CMAKE_COMMAND} --build ${WORK}/build)
step(${WORK}/build/consumer)
message(STATUS "${output}")
step(ldd ${WORK}/build/consumer)
if(output MATCHES "torch|libc10")
  message(FATAL_ERROR "libnsa depends on torch:\n${output}")
endif()

step(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR} -B ${WORK}/subproject -G Ninja -DCMAKE_CXX_COMPILER=${CXX}
  -DNSA_SOURCE=${CMAKE_CURRENT_LIST_DIR}/../..)
step(${CMAKE_COMMAND} --build ${WORK}/subproject --target CMakeFiles/consumer.dir/main.cpp.o)

find_program(PKG_CONFIG NAMES pkg-config pkgconf)
if(NOT PKG_CONFIG)
  message(STATUS "nsa.pc is not tested: no pkg-config")
  return()
endif()
file(GLOB_RECURSE pc ${WORK}/prefix/*/nsa.pc)
get_filename_component(folder ${pc} DIRECTORY)
set(ENV{PKG_CONFIG_PATH} ${folder})
set(ENV{LD_LIBRARY_PATH} ${folder}/..)
step(sh -c "'${CXX}' '${CMAKE_CURRENT_LIST_DIR}/main.cpp' -o '${WORK}/consumer' $('${PKG_CONFIG}' --cflags --libs nsa)")
step(${WORK}/consumer)
