# Installs the build tree under a fresh prefix and builds the program in outside/ against it: as a
# CMake package, with pkg-config, in C and (with CXX) in C++.
#   cmake -DBUILD=... -DOUTSIDE=... -DWORK=... -DCC=... [-DCXX=...] [-DPKG_CONFIG=...] -P installed.cmake
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE bad OUTPUT_VARIABLE out ERROR_VARIABLE out)
  if(bad)
    message(FATAL_ERROR "failed: ${ARGN}\n${out}")
  endif()
  set(out "${out}" PARENT_SCOPE)
endfunction()
function(run_program)
  run(${ARGN})
  if(NOT out STREQUAL "ok\n")
    message(FATAL_ERROR "${ARGN} printed: ${out}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK})
set(prefix ${WORK}/prefix)
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix})

run(${CMAKE_COMMAND} -S ${OUTSIDE} -B ${WORK}/cmake -DCMAKE_PREFIX_PATH=${prefix}
  -DCMAKE_C_COMPILER=${CC})
run(${CMAKE_COMMAND} --build ${WORK}/cmake)
foreach(kind tinyllm static shared)
  run_program(${WORK}/cmake/outside_${kind})
endforeach()
message(STATUS "find_package: ok")

if(PKG_CONFIG)
  # The tree may have been moved since: the file finds its own place.
  file(RENAME ${prefix} ${WORK}/moved)
  file(GLOB_RECURSE pc ${WORK}/moved/tinyllm.pc)
  get_filename_component(pc_dir ${pc} DIRECTORY)
  set(ENV{PKG_CONFIG_PATH} ${pc_dir})
  run(${PKG_CONFIG} --cflags --libs tinyllm)
  string(REGEX REPLACE "\n" " " flags "${out}")
  separate_arguments(flags)
  get_filename_component(lib_dir ${pc_dir} DIRECTORY)
  run(${CC} -std=c11 -o ${WORK}/with_pkg_config ${OUTSIDE}/outside.c ${flags} -Wl,-rpath,${lib_dir})
  run_program(${WORK}/with_pkg_config)
  message(STATUS "pkg-config: ok")
  if(CXX)
    run(${CXX} -std=c++17 -o ${WORK}/with_cxx -x c++ ${OUTSIDE}/outside.c -x none ${flags}
      -Wl,-rpath,${lib_dir})
    run_program(${WORK}/with_cxx)
    message(STATUS "C++: ok")
  endif()
endif()
