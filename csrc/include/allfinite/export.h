// Marks what liballfinite.so exports; everything else is hidden.
#pragma once
#define ALLFINITE_API __attribute__((visibility("default")))
