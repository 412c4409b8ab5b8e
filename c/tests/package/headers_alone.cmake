# Every public header compiles alone and twice, in C11 and in C++17.
#   cmake -DINCLUDE=... -DCC=... [-DCXX=...] -P headers_alone.cmake
file(GLOB_RECURSE headers RELATIVE ${INCLUDE} ${INCLUDE}/*.h)
if(NOT headers)
  message(FATAL_ERROR "no headers under ${INCLUDE}")
endif()
set(warnings -pedantic -Wall -Wextra -Wconversion -Wshadow -Werror -fsyntax-only -I${INCLUDE})
foreach(header ${headers})
  file(WRITE headers_alone_unit.c
    "#include \"${header}\"\n#include \"${header}\"\nint tl_unit_is_not_empty;\n")
  execute_process(COMMAND ${CC} -std=c11 -x c ${warnings} headers_alone_unit.c RESULT_VARIABLE bad)
  if(bad)
    message(FATAL_ERROR "${header} does not compile alone as C11")
  endif()
  if(CXX)
    execute_process(COMMAND ${CXX} -std=c++17 -x c++ ${warnings} headers_alone_unit.c
      RESULT_VARIABLE bad)
    if(bad)
      message(FATAL_ERROR "${header} does not compile alone as C++17")
    endif()
  endif()
  message(STATUS "${header}")
endforeach()
file(REMOVE headers_alone_unit.c)
