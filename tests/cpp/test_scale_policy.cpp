// ScalePolicy: values that are refused, and where the scale goes.
#include "allfinite/amp/scale_policy.h"

#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "catch.h"

namespace allfinite::amp {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

std::string refusal(const std::function<void()>& f) {
  try {
    f();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

ScalePolicy with_bounds(double min_scale, double max_scale, int64_t growth_interval = 1) {
  return {2.0, 0.5, growth_interval, min_scale, max_scale};
}

TEST_CASE("ScalePolicy: the defaults are torch's, with a floor of 1 and a cap of 2^24") {
  const ScalePolicy policy;
  CHECK(policy.growth_factor() == 2);
  CHECK(policy.backoff_factor() == 0.5);
  CHECK(policy.growth_interval() == 2000);
  CHECK(policy.min_scale() == 1);
  CHECK(policy.max_scale() == 0x1p24);
}

TEST_CASE("ScalePolicy: every value is checked in the constructor and in its setter, and a refusal changes nothing") {
  ScalePolicy policy;
  for (double bad : {kNaN, kInf, -kInf, 0.0, -2.0, 1.0}) {
    CHECK(refusal([&] { policy.set_growth_factor(bad); }) != "no error");
    CHECK(refusal([&] { ScalePolicy(bad, 0.5, 1); }) != "no error");
  }
  for (double bad : {kNaN, kInf, 0.0, -0.5, 1.0, 2.0}) {
    CHECK(refusal([&] { policy.set_backoff_factor(bad); }) != "no error");
    CHECK(refusal([&] { ScalePolicy(2, bad, 1); }) != "no error");
  }
  for (int64_t bad : {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::min()}) {
    CHECK(refusal([&] { policy.set_growth_interval(bad); }) != "no error");
    CHECK(refusal([&] { ScalePolicy(2, 0.5, bad); }) != "no error");
  }
  for (double bad : {kNaN, kInf, 0.0, -1.0, 0x1p-127, 0x1p127}) {
    CHECK(refusal([&] { policy.set_min_scale(bad); }) != "no error");
    CHECK(refusal([&] { policy.set_max_scale(bad); }) != "no error");
    CHECK(refusal([&] { with_bounds(bad, 1); }) != "no error");
    CHECK(refusal([&] { with_bounds(1, bad); }) != "no error");
  }
  CHECK(refusal([&] { policy.set_min_scale(0x1p25); }) != "no error");
  CHECK(refusal([&] { policy.set_max_scale(0.5); }) != "no error");
  CHECK(policy == ScalePolicy());
  CHECK_NOTHROW(with_bounds(0x1p-126, 0x1p126));
  CHECK_NOTHROW(with_bounds(4, 4));
}

TEST_CASE("ScalePolicy: a refusal names the argument, what was expected and what came") {
  CHECK(refusal([] { ScalePolicy(kNaN, 0.5, 1); }) ==
        "allfinite::ScalePolicy: expected growth_factor to be finite and > 1, but got nan");
  CHECK(refusal([] { ScalePolicy(2, 1, 1); }) ==
        "allfinite::ScalePolicy: expected backoff_factor in (0, 1), but got 1");
  CHECK(refusal([] { ScalePolicy(2, 0.5, 0); }) == "allfinite::ScalePolicy: expected growth_interval >= 1, but got 0");
  CHECK(refusal([] { with_bounds(0, 1); }) ==
        "allfinite::ScalePolicy: expected min_scale in [2^-126, 2^126], but got 0");
  CHECK(refusal([] { with_bounds(2, 1); }) ==
        "allfinite::ScalePolicy: expected min_scale <= max_scale, but got min_scale 2 and max_scale 1");
  CHECK(refusal([] { ScalePolicy::check_scale("new_scale", -4); }) ==
        "allfinite::ScalePolicy: expected new_scale to be finite and > 0 as float32, but got -4");
  CHECK(refusal([] { ScalePolicy::check_tracker(-1); }) ==
        "allfinite::ScalePolicy: expected growth_tracker in [0, 2^31 - 1), but got -1");
}

TEST_CASE("ScalePolicy: a scale that is 0 or infinite only as float32 is refused") {
  CHECK(refusal([] { ScalePolicy::check_scale("scale", 1e-50); }) != "no error");
  CHECK(refusal([] { ScalePolicy::check_scale("scale", 1e39); }) != "no error");
  CHECK(ScalePolicy::check_scale("scale", 0.1) == static_cast<double>(0.1f));
}

TEST_CASE("ScalePolicy: torch's sequence of growth and back-off") {
  const ScalePolicy policy(2.0, 0.25, 2);
  ScaleState state{4, 0};
  state = policy.next(state, false);
  CHECK((state.scale == 4 && state.growth_tracker == 1));
  state = policy.next(state, false);
  CHECK((state.scale == 8 && state.growth_tracker == 0));
  state = policy.next(state, false);
  state = policy.next(state, true);
  CHECK((state.scale == 2 && state.growth_tracker == 0));
}

TEST_CASE("ScalePolicy: an interval that was lowered below the tracker still grows (N19)") {
  CHECK(ScalePolicy(2, 0.5, 50).next({8, 60}, false).scale == 16);
}

TEST_CASE("ScalePolicy: the floor stops back-off and the cap stops growth") {
  const auto policy = with_bounds(1, 1024);
  CHECK(policy.next({1.5, 0}, true).scale == 1);
  CHECK(policy.next({1, 0}, true).scale == 1);
  CHECK(policy.next({1000, 0}, false).scale == 1024);
  CHECK(policy.next({1024, 0}, false).scale == 1024);
}

TEST_CASE("ScalePolicy: a bound never moves a scale that a user put beyond it") {
  const auto policy = with_bounds(1, 1024);
  CHECK(policy.next({0.25, 0}, true).scale == 0.25);
  CHECK(policy.next({0.25, 0}, false).scale == 0.5);
  CHECK(policy.next({65536, 0}, false).scale == 65536);
  CHECK(policy.next({65536, 0}, true).scale == 32768);
}

TEST_CASE("ScalePolicy: with the widest bounds 300 back-offs or growths end at normal numbers (N1, N1b)") {
  const auto policy = with_bounds(0x1p-126, 0x1p126);
  ScaleState down{65536, 0}, up{65536, 0};
  for (int i = 0; i < 300; ++i) {
    down = policy.next(down, true);
    up = policy.next(up, false);
  }
  CHECK(down.scale == 0x1p-126);
  CHECK(up.scale == 0x1p126);
  CHECK(std::isnormal(static_cast<float>(1 / up.scale)));
}

TEST_CASE("ScalePolicy: the host's step and the tensors' step agree bit for bit") {
  const ScalePolicy policy(1.37, 0.61, 3, 0.7, 9000.5);
  ScaleState host{123.456f, 0};
  const at::Tensor scale = at::scalar_tensor(host.scale, at::kFloat), tracker = at::scalar_tensor(0, at::kInt);
  for (int i = 0; i < 200; ++i) {
    const bool found = i % 7 == 5 || i % 50 > 40;
    host = policy.next(host, found);
    policy.update_(scale, tracker, at::scalar_tensor(found ? kNaN : 0.0, at::kFloat));  // anything but 0 is found
    REQUIRE(host.scale == scale.item<float>());
    REQUIRE(host.growth_tracker == tracker.item<int32_t>());
  }
}

}  // namespace
}  // namespace allfinite::amp
