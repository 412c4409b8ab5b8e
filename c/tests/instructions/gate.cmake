# Counts the instructions of each case of count.c under callgrind and fails when one takes more than
# its limit. cmake -DCOUNT=path/to/count -DVALGRIND=path/to/valgrind -P gate.cmake
#
# The limits are the larger of what gcc 12 and clang 14 need, plus 4 %: a few instructions of a
# compiler's taste, not a lost unrolling, a second pass or a call in a loop. Raising one is a change
# to be explained. valgrind knows no 256-bit carry-less multiplication, so tl_crc32c runs as pclmul
# here, and the wider variants, the same source with other constants, are measured in
# bench_bytes only.
set(limits
  "crc-slicing8 213021"
  "crc-sse42 34475"
  "crc-pclmul 17673"
  "crc-16-bytes 68"
  "copy-crc 41803"
  "hash-one 387"
  "hash-four 1770"
  "export-full 42212"
  "export-one-token 14524"
)

execute_process(COMMAND ${COUNT} hash-one 1 OUTPUT_VARIABLE out ERROR_VARIABLE out RESULT_VARIABLE rc)
if(NOT rc EQUAL 0)
  message(FATAL_ERROR "${COUNT} does not run: ${out}")
endif()

# Instructions of `count NAME N`, or "" when the case is skipped.
function(instructions result name n)
  execute_process(
    COMMAND ${VALGRIND} --tool=callgrind --callgrind-out-file=/dev/null ${COUNT} ${name} ${n}
    OUTPUT_VARIABLE out ERROR_VARIABLE err RESULT_VARIABLE rc)
  if(out MATCHES "SKIP")
    set(${result} "" PARENT_SCOPE)
  elseif(rc EQUAL 0 AND err MATCHES "Collected : ([0-9]+)")
    set(${result} ${CMAKE_MATCH_1} PARENT_SCOPE)
  else()
    message(FATAL_ERROR "valgrind on ${name}: ${rc}\n${out}${err}")
  endif()
endfunction()

set(failed "")
foreach(line IN LISTS limits)
  string(REPLACE " " ";" line "${line}")
  list(GET line 0 name)
  list(GET line 1 limit)
  instructions(none ${name} 0)
  if(none STREQUAL "")
    message("${name}: not on this processor")
    continue()
  endif()
  instructions(with ${name} 10)
  math(EXPR each "(${with} - ${none}) / 10")
  message("${name}: ${each} instructions, at most ${limit}")
  if(each GREATER limit)
    list(APPEND failed "${name} takes ${each} instructions, its limit is ${limit}")
  endif()
endforeach()
if(failed)
  list(JOIN failed "\n" text)
  message(FATAL_ERROR "${text}")
endif()
