// AutocastGuard: what is on inside, and that everything is back afterwards.
#include "allfinite/amp/autocast_guard.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>

#include <stdexcept>
#include <tuple>

#include "amp_support.h"
#include "catch.h"

namespace allfinite::amp {
namespace {

using test::error_of;
using test::Warnings;

std::tuple<bool, at::ScalarType, bool> cpu_state() {
  return {at::autocast::is_autocast_enabled(at::kCPU), at::autocast::get_autocast_dtype(at::kCPU),
          at::autocast::is_autocast_cache_enabled()};
}

at::ScalarType product_dtype() {
  return at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type();
}

// The nesting count, by counting up and down once.
int nesting() {
  const int count = at::autocast::increment_nesting() - 1;
  at::autocast::decrement_nesting();
  return count;
}

TEST_CASE("AutocastGuard: ops run in the given dtype inside, and the state is back afterwards") {
  const auto before = cpu_state();
  {
    AutocastGuard guard(at::kCPU, at::kHalf);
    CHECK(product_dtype() == at::kHalf);
  }
  CHECK(product_dtype() == at::kFloat);
  CHECK(cpu_state() == before);
  CHECK(nesting() == 0);
}

TEST_CASE("AutocastGuard: without a dtype it is the device's, bfloat16 on a CPU") {
  AutocastGuard guard(at::kCPU);
  CHECK(product_dtype() == at::kBFloat16);
}

TEST_CASE("AutocastGuard: guards nest, and each puts back what it found") {
  AutocastGuard outer(at::kCPU, at::kHalf);
  {
    AutocastGuard off(at::kCPU, at::kHalf, /*enabled=*/false);
    CHECK(product_dtype() == at::kFloat);
    {
      AutocastGuard inner(at::kCPU, at::kBFloat16, true, /*cache_enabled=*/false);
      CHECK(product_dtype() == at::kBFloat16);
      CHECK_FALSE(at::autocast::is_autocast_cache_enabled());
      CHECK(nesting() == 3);
    }
    CHECK(product_dtype() == at::kFloat);
    CHECK(at::autocast::is_autocast_cache_enabled());
  }
  CHECK(product_dtype() == at::kHalf);
  CHECK(nesting() == 1);
}

TEST_CASE("AutocastGuard: an exception leaves nothing behind") {
  const auto before = cpu_state();
  try {
    AutocastGuard guard(at::kCPU, at::kHalf, true, false);
    throw std::runtime_error("from the forward pass");
  } catch (const std::runtime_error&) {
  }
  CHECK(cpu_state() == before);
  CHECK(nesting() == 0);
}

TEST_CASE("AutocastGuard: a cast weight is cached inside, dropped at the outermost exit, and never stale") {
  at::Tensor weight = at::ones({2, 2}).requires_grad_();
  const at::Tensor input = at::ones({1, 2});
  const auto run = [&] {
    AutocastGuard guard(at::kCPU, at::kBFloat16);
    return at::mm(input, weight).to(at::kFloat).sum().item<float>();
  };
  CHECK(run() == 4);
  {
    c10::NoGradGuard no_grad;
    weight.fill_(2);
  }
  CHECK(run() == 8);  // 4 with a cache that outlives the guard

  AutocastGuard outer(at::kCPU, at::kBFloat16);
  const at::Tensor cast = at::autocast::cached_cast(at::kBFloat16, weight, at::kCPU);
  {
    AutocastGuard inner(at::kCPU, at::kBFloat16);
  }
  CHECK(cast.is_same(at::autocast::cached_cast(at::kBFloat16, weight, at::kCPU)));  // an inner exit keeps the cache
}

TEST_CASE("AutocastGuard: a forward without gradients inside leaves no cast weight that has none") {
  const at::Tensor weight = at::ones({2, 2}).requires_grad_(), input = at::ones({1, 2});
  AutocastGuard outer(at::kCPU, at::kBFloat16);
  {
    c10::NoGradGuard no_grad;
    AutocastGuard guard(at::kCPU, at::kBFloat16);
    CHECK_FALSE(at::autocast::is_autocast_cache_enabled());  // what the older torch versions need
    at::mm(input, weight);
  }
  CHECK(at::mm(input, weight).requires_grad());
}

TEST_CASE("AutocastGuard: a dtype or device that cannot autocast is refused, or switched off with a warning") {
  const auto before = cpu_state();
  CHECK(error_of<c10::TypeError>([] { AutocastGuard guard(at::kCPU, at::kLong); }) ==
        "allfinite::AutocastGuard: expected a floating point dtype, but got Long");
  CHECK(error_of([] { AutocastGuard guard(at::kMeta, at::kHalf); }) ==
        "allfinite::AutocastGuard: expected a device with autocast, but got meta");
  CHECK(cpu_state() == before);
  CHECK(nesting() == 0);

  Warnings warnings;
  {
    AutocastGuard guard(at::kCPU, at::kDouble);
    CHECK(product_dtype() == at::kFloat);
  }
  REQUIRE(warnings.texts.size() == 1);
  CHECK(warnings.texts[0] ==
        "allfinite::AutocastGuard: expected dtype float16 or bfloat16 for device cpu, but got Double. Disabling "
        "autocast.");
  CHECK(cpu_state() == before);
}

TEST_CASE("AutocastGuard: a CUDA guard without CUDA warns and is disabled") {
  if (at::hasCUDA()) {
    return;
  }
  Warnings warnings;
  AutocastGuard guard(at::kCUDA, at::kHalf);
  CHECK_FALSE(at::autocast::is_autocast_enabled(at::kCUDA));
  CHECK(warnings.texts.size() == 1);
}

}  // namespace
}  // namespace allfinite::amp
