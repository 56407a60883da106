// Everything of AllFinite for a C++ trainer: find_package(AllFinite), link AllFinite::allfinite, include
// this.
#pragma once
#include "allfinite/amp/autocast_guard.h"
#include "allfinite/amp/grad_scaler.h"
#include "allfinite/amp/scale_policy.h"
#include "allfinite/nn.h"
#include "allfinite/ops.h"
