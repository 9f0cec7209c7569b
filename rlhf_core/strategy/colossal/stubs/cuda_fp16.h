// The kernel casts to and from half precision by CUDA's name for it.
#pragma once
#include <c10/util/Half.h>
using __half = c10::Half;
