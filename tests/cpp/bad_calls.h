// Calls that must be refused, each with the class and the text of its error, and without a write.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>

#include <functional>
#include <string>
#include <vector>

#include "catch.h"

struct BadCall {
  std::function<void()> call;
  std::string kind, message;
};

// The class of what `call` throws, "none" for nothing; `message`: its text without torch's backtrace.
inline std::string kind_of_error(const std::function<void()>& call, std::string& message) {
  try {
    call();
  } catch (const c10::TypeError& e) {
    return message = e.what_without_backtrace(), "TypeError";
  } catch (const c10::ValueError& e) {
    return message = e.what_without_backtrace(), "ValueError";
  } catch (const c10::IndexError& e) {
    return message = e.what_without_backtrace(), "IndexError";
  } catch (const c10::NotImplementedError& e) {
    return message = e.what_without_backtrace(), "NotImplementedError";
  } catch (const c10::Error& e) {
    return message = e.what_without_backtrace(), "Error";
  }
  return "none";
}

// `op`: the name in front of every message. `arguments`: what no call may write to, not even the value that is there.
inline void check_refused(const std::string& op, const std::vector<BadCall>& cases,
                          const std::vector<at::Tensor>& arguments = {}) {
  for (const BadCall& bad : cases) {
    INFO(bad.message);
    std::vector<at::Tensor> before;
    std::vector<int64_t> writes;
    for (const at::Tensor& t : arguments) {
      before.push_back(t.detach().clone());
      writes.push_back(t._version());
    }
    std::string message;
    CHECK(kind_of_error(bad.call, message) == bad.kind);
    CHECK(message == op + ": " + bad.message);
    for (size_t i = 0; i < arguments.size(); ++i) {
      CHECK(at::equal(arguments[i], before[i]));
      CHECK(arguments[i]._version() == writes[i]);
    }
  }
}
