// Calls that must be refused, each with the class and the text of its error.
#pragma once
#include <c10/util/Exception.h>

#include <functional>
#include <string>
#include <vector>

#include "catch.h"

struct BadCall {
  std::function<void()> call;
  std::string kind, message;
};

// `op`: the name in front of every message.
inline void check_refused(const std::string& op, const std::vector<BadCall>& cases) {
  for (const BadCall& bad : cases) {
    INFO(bad.message);
    std::string kind = "none", message;
    try {
      bad.call();
    } catch (const c10::TypeError& e) {
      kind = "TypeError", message = e.what_without_backtrace();
    } catch (const c10::ValueError& e) {
      kind = "ValueError", message = e.what_without_backtrace();
    } catch (const c10::NotImplementedError& e) {
      kind = "NotImplementedError", message = e.what_without_backtrace();
    } catch (const c10::Error& e) {
      kind = "Error", message = e.what_without_backtrace();
    }
    CHECK(kind == bad.kind);
    CHECK(message == op + ": " + bad.message);
  }
}
