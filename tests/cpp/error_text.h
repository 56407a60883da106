// The message of the error that a call must raise, without torch's backtrace.
#pragma once
#include <c10/util/Exception.h>

#include <string>

// Empty where `call` raises nothing; an error of another type ends the test.
template <class Error, class Call>
std::string error_text(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return {};
}
