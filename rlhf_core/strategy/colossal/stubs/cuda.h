// Empty: the kernel names this header of CUDA's, but uses nothing of it.
#pragma once
