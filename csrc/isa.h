// Which instruction sets this build has, and the choice among them for this CPU.
#pragma once

#include <string>
#include <vector>

#include "types.h"

namespace pagoda {

// Names of those that this build has and this CPU can run, the slowest first.
std::vector<std::string> available_isas();

// Raises std::invalid_argument if it is not available. Not for use while a kernel runs.
void use_isa(const std::string& name);

// The one in use: at first the fastest available.
const IsaTable& isa();

}  // namespace pagoda
