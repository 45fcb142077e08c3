#include "isa.h"

#include <stdexcept>

#if defined(PAGODA_X86)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pagoda {

namespace portable {
extern const IsaTable table;
}

#if defined(PAGODA_X86)
namespace avx2 {
extern const IsaTable table;
}
namespace avx512 {
extern const IsaTable table;
}
namespace amx {
extern const IsaTable table;
}
#endif

namespace {

#if defined(PAGODA_X86)
bool runs_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool runs_avx512() {
    return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// Linux gives a process the tile registers when it asks for them.
bool runs_amx() {
    constexpr unsigned kAmxBF16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25, kNeeded = kAmxBF16 | kAmxTile | kAmxInt8;
    unsigned a, b, c, d;
    if (!runs_avx512() || !__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vbmi")) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kNeeded) != kNeeded) return false;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

std::vector<const IsaTable*> runnable() {
    std::vector<const IsaTable*> tables{&portable::table};
#if defined(PAGODA_X86)
    if (runs_avx2()) tables.push_back(&avx2::table);
    if (runs_avx512()) tables.push_back(&avx512::table);
    if (runs_amx()) tables.push_back(&amx::table);
#endif
    return tables;
}

const std::vector<const IsaTable*> tables = runnable();
const IsaTable* chosen = tables.back();

}  // namespace

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const IsaTable* table : tables) names.push_back(table->name);
    return names;
}

void use_isa(const std::string& name) {
    for (const IsaTable* table : tables) {
        if (table->name == name) {
            chosen = table;
            return;
        }
    }
    std::string known;
    for (const IsaTable* table : tables) known += std::string(known.empty() ? "" : ", ") + table->name;
    throw std::invalid_argument("instruction set '" + name + "' is not available here; available: " + known);
}

const IsaTable& isa() { return *chosen; }

}  // namespace pagoda
