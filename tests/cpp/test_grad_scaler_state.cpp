// GradScaler: saving and loading, before and after its first use, and archives that are refused.
#include <torch/serialize.h>

#include <optional>
#include <sstream>
#include <utility>

#include "allfinite/amp/grad_scaler.h"
#include "amp_support.h"
#include "catch.h"

namespace allfinite::amp {
namespace {

using namespace allfinite::test;

std::string saved(const GradScaler& scaler) {
  std::stringstream file;
  torch::save(scaler, file);
  return file.str();
}

void load(GradScaler& scaler, const std::string& bytes) {
  std::stringstream file(bytes);
  torch::load(scaler, file);
}

const GradScalerOptions kOptions =
    cpu_options(3).growth_factor(4).backoff_factor(0.25).growth_interval(7).min_scale(0.5).max_scale(1024);

// An archive as GradScaler::save writes it, but for the value of `key`; an empty value leaves the key out.
std::string archive_with(const std::string& key, const std::optional<c10::IValue>& value) {
  torch::serialize::OutputArchive archive;
  std::vector<std::pair<std::string, c10::IValue>> items{
      {"enabled", true},      {"scale", 8.0},          {"growth_tracker", int64_t{5}},
      {"growth_factor", 4.0}, {"backoff_factor", .25}, {"growth_interval", int64_t{7}},
      {"min_scale", 0.5},     {"max_scale", 1024.0}};
  for (auto& [name, content] : items) {
    if (name != key) {
      archive.write(name, content);
    } else if (value) {
      archive.write(name, *value);
    }
  }
  std::stringstream file;
  archive.save_to(file);
  return file.str();
}

TEST_CASE("GradScaler state: a round trip keeps everything, used or not on either side") {
  for (bool source_used : {false, true}) {
    for (bool target_used : {false, true}) {
      GradScaler source(kOptions);
      if (source_used) {
        auto optimizer = sgd({parameter(values({1}))});
        source.scale(at::ones({}));
        source.step(optimizer);
        source.update();
      }
      GradScaler target = GradScaler(cpu_options());
      if (target_used) {
        target.scale(at::ones({}));
      }
      load(target, saved(source));
      CHECK(target.get_scale() == 3);
      CHECK(target.get_growth_tracker() == (source_used ? 1 : 0));
      CHECK(target.policy() == source.policy());
      CHECK(target.scale(values({4})).item<float>() == 12);
    }
  }
}

TEST_CASE("GradScaler state: after a load the first unscale_ or step needs no scale() before it (N31)") {
  for (bool unscale : {false, true}) {
    GradScaler scaler(cpu_options());
    load(scaler, saved(used_scaler(kOptions)));
    const Tensor p = parameter(values({12}));
    auto optimizer = sgd({p});
    if (unscale) {
      scaler.unscale_(optimizer);
    }
    CHECK(scaler.step(optimizer).status == StepStatus::Stepped);
    CHECK(p.item<float>() == -4);
    scaler.update();
    CHECK(scaler.get_growth_tracker() == 1);
  }
}

TEST_CASE("GradScaler state: after a load a step without gradients, and a new scale, need no scale() either") {
  GradScaler scaler(cpu_options());
  scaler.load_state(GradScaler(kOptions).state());
  auto empty = sgd({at::zeros({1}).requires_grad_()});
  CHECK(scaler.step(empty).status == StepStatus::NoGradients);
  scaler.update();
  CHECK(scaler.get_scale() == 3);
  scaler.update(16);
  CHECK(scaler.get_scale() == 16);
}

TEST_CASE("GradScaler state: a scale at either end of fp32 survives exactly") {
  for (double scale : {0x1p-126, 65535.99609375, 0x1p127}) {
    GradScaler target(cpu_options());
    load(target, saved(GradScaler(cpu_options(scale))));
    CHECK(target.get_scale() == scale);
  }
}

TEST_CASE("GradScaler state: an archive that no scaler can have written is refused and changes nothing (N34)") {
  const std::vector<std::pair<std::string, std::optional<c10::IValue>>> bad{
      {"scale", c10::IValue(double(kNaN))},
      {"scale", c10::IValue(0.0)},
      {"scale", c10::IValue(-8.0)},
      {"scale", c10::IValue(double(kInf))},
      {"scale", c10::IValue(int64_t{8})},
      {"scale", std::nullopt},
      {"growth_tracker", c10::IValue(int64_t{-1})},
      {"growth_tracker", c10::IValue(1.0)},
      {"growth_factor", c10::IValue(1.0)},
      {"growth_factor", c10::IValue(double(kNaN))},
      {"backoff_factor", c10::IValue(0.0)},
      {"growth_interval", c10::IValue(int64_t{0})},
      {"min_scale", c10::IValue(2048.0)},
      {"max_scale", c10::IValue(double(kInf))},
      {"max_scale", std::nullopt},
      {"enabled", c10::IValue(1.0)},
      {"enabled", c10::IValue(false)}};
  for (const auto& [key, value] : bad) {
    GradScaler scaler = used_scaler();
    CHECK(error_of([&, &k = key, &v = value] { load(scaler, archive_with(k, v)); }) != "no error");
    CHECK(scaler.get_scale() == 65536);
    CHECK(scaler.get_growth_tracker() == 0);
    CHECK(scaler.policy() == ScalePolicy());
  }
  GradScaler scaler(cpu_options());
  load(scaler, archive_with("no such key", std::nullopt));
  CHECK(scaler.get_scale() == 8);
  CHECK(scaler.get_growth_tracker() == 5);
}

TEST_CASE("GradScaler state: a refusal says which value, and what came") {
  GradScaler scaler(cpu_options());
  CHECK(error_of<c10::ValueError>([&] { load(scaler, archive_with("scale", c10::IValue(double(kNaN)))); }) ==
        "allfinite::ScalePolicy: expected scale to be finite and > 0 as float32, but got nan");
  CHECK(error_of([&] { load(scaler, archive_with("max_scale", std::nullopt)); }) ==
        "allfinite::GradScaler::load: expected the archive of a GradScaler, but got one without \"max_scale\"");
  CHECK(error_of([&] { load(scaler, archive_with("growth_interval", c10::IValue(2.0))); }) ==
        "allfinite::GradScaler::load: expected \"growth_interval\" to be an integer, but got Double");
  CHECK(error_of([&] { load(scaler, saved(GradScaler(cpu_options().enabled(false)))); }) ==
        "allfinite::GradScaler::load: expected the state of an enabled GradScaler, but got one that was saved from a "
        "disabled instance of GradScaler.");
  const ScalePolicy policy;
  CHECK(error_of<c10::ValueError>([&] { scaler.load_state({8, -1, policy}); }) ==
        "allfinite::ScalePolicy: expected growth_tracker in [0, 2^31 - 1), but got -1");
}

TEST_CASE("GradScaler state: a file that is no archive is refused and changes nothing") {
  GradScaler scaler = used_scaler();
  CHECK_THROWS(load(scaler, "not an archive"));
  CHECK(scaler.get_scale() == 65536);
}

TEST_CASE("GradScaler state: a disabled scaler ignores what it loads") {
  GradScaler scaler(cpu_options().enabled(false));
  load(scaler, saved(GradScaler(kOptions)));
  CHECK(scaler.get_scale() == 1);
  CHECK(scaler.policy() == ScalePolicy());
}

}  // namespace
}  // namespace allfinite::amp
