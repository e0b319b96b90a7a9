#include "worker/store.h"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <numeric>
#include <utility>

namespace mesh {

namespace {

const std::vector<std::string> NOTHING;

uint64_t sum_of_sizes(const std::vector<weight *> & weights) {
    return std::accumulate(weights.begin(), weights.end(), uint64_t{0}, [](uint64_t sum, const weight * one) {
        return sum + one->size();
    });
}

}  // namespace

std::string in_megabytes(uint64_t bytes) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f MB", static_cast<double>(bytes) / 1e6);
    return text;
}

weight_lease::~weight_lease() {
    if (owner_ != nullptr) {
        owner_->release(held_);
    }
}

weight_lease::weight_lease(weight_lease && other) noexcept
    : owner_(std::exchange(other.owner_, nullptr)), held_(std::move(other.held_)) {}

weight_lease & weight_lease::operator=(weight_lease && other) noexcept {
    std::swap(owner_, other.owner_);
    std::swap(held_, other.held_);
    return *this;
}

void store::use_main_memory(int (*chosen)(const char *), int layers, uint64_t quota) {
    in_main_memory_ = chosen;
    main_memory_layers_ = layers;
    main_memory_quota_ = quota;
}

// Puts weights of layers `first` to `last` (not included), and those of none, where they belong; held ones stay.
void store::place(const model_weights & model, int first, int last) {
    if (in_main_memory_ == nullptr) {
        return;
    }
    for (const auto & [name, one] : model.by_name()) {
        const int layer = layer_of_weight(name);
        if (layer >= 0 && (layer < first || layer >= last)) {
            continue;
        }
        const bool near = main_memory_layers_ < 0 || layer < 0 || layer - first < main_memory_layers_;
        const bool wanted = near && in_main_memory_(name.c_str()) != 0;
        if (wanted != one->residence.in_main_memory && one->residence.holders == 0) {
            if (one->residence.counted) {
                evict(one.get());
            }
            one->move(wanted ? ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) : device_, wanted);
        }
    }
}

uint64_t store::left() {
    const std::lock_guard lock(mutex_);
    return unused();
}

uint64_t store::unused() const {
    return quota_ - std::min(quota_, taken_ + resident_ - sum_of_sizes(idle_weights()));
}

uint64_t store::set_aside_size() const {
    return std::accumulate(rooms_.begin(), rooms_.end(), uint64_t{0}, [](uint64_t sum, const auto & room) {
        return sum + room->size();
    });
}

std::shared_ptr<state_room> store::set_aside(uint64_t least, uint64_t most) {
    const std::lock_guard lock(mutex_);
    const uint64_t vacant = quota_ - std::min(quota_, taken_ + resident_ + set_aside_size());
    const uint64_t size = std::min(most, std::max(std::min(least, unused()), vacant / 2));
    if (size == 0 || !make_room(size)) {
        return nullptr;
    }
    auto room = std::make_shared<state_room>(device_, size);
    if (room->is_gone()) {
        return nullptr;
    }
    rooms_.push_back(room);
    return room;
}

void store::end(const std::shared_ptr<state_room> & room) {
    const std::lock_guard lock(mutex_);
    rooms_.erase(std::remove(rooms_.begin(), rooms_.end(), room), rooms_.end());
}

bool store::take(uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (!make_room(bytes)) {
        return false;
    }
    taken_ += bytes;
    return true;
}

void store::give_back(uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    taken_ -= bytes;
}

void store::add_model(
    const std::string & fingerprint, const std::vector<std::string> & paths, const std::vector<std::string> * there
) {
    auto model = std::make_unique<model_weights>(device_, paths);
    const std::lock_guard lock(mutex_);
    const auto known = models_.find(fingerprint);
    if (known != models_.end() && known->second->paths() != paths) {
        forget(fingerprint);  // the same model in other files
    }
    // Told twice, it is the same one: the files may only have got more of what was missing.
    const auto [told, is_new] = models_.emplace(fingerprint, std::move(model));
    told->second->allow(there);
    if (is_new) {
        place(*told->second, 0, INT_MAX);
    }
}

// With the lock held.
void store::forget(const std::string & fingerprint) {
    model_weights & model = *models_.at(fingerprint);
    for (const weight * one : model.all()) {
        if (one->residence.holders != 0) {
            throw std::runtime_error("engines use its weights from other files");
        }
    }
    for (weight * one : model.all()) {
        if (one->residence.counted) {
            evict(one);
        }
    }
    // Not freed: a session may be about to look a weight up in it, and finds out under the lock.
    model.allow(&NOTHING);
    retired_.push_back(std::move(models_.at(fingerprint)));
    models_.erase(fingerprint);
}

model_weights & store::find_model(const std::string & fingerprint) {
    const std::lock_guard lock(mutex_);
    const auto found = models_.find(fingerprint);
    if (found == models_.end()) {
        throw std::runtime_error("it has no copy of the model " + fingerprint);
    }
    return *found->second;
}

bool store::has_model(const std::string & fingerprint) {
    const std::lock_guard lock(mutex_);
    return models_.count(fingerprint) != 0;
}

weight_lease store::attach(
    const std::string & fingerprint, const std::vector<wire::attach_entry> & entries,
    std::map<uint64_t, weight *> & by_offset
) {
    model_weights & model = find_model(fingerprint);
    std::vector<weight *> wanted;
    for (const wire::attach_entry & entry : entries) {
        const std::string name(entry.name, std::find(entry.name, entry.name + sizeof entry.name, '\0'));
        weight * found = model.find(name);
        if (found == nullptr) {
            throw std::runtime_error("its copy of the model has no tensor " + name);
        }
        if (static_cast<uint32_t>(found->type()) != entry.type || found->elements() != entry.elements ||
            found->size() != entry.size) {
            throw std::runtime_error("its copy of the model has another " + name);
        }
        by_offset[entry.offset] = found;
        wanted.push_back(found);
    }
    return hold(std::move(wanted));
}

weight_lease store::hold(std::vector<weight *> && wanted) {
    // One that is named twice is held once.
    std::sort(wanted.begin(), wanted.end());
    wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
    const std::lock_guard lock(mutex_);
    for (const weight * one : wanted) {
        if (!one->residence.there) {
            throw std::runtime_error("its files have holes where some of these weights belong");
        }
    }
    uint64_t missing = 0;
    uint64_t missing_in_main_memory = 0;
    for (weight * one : wanted) {
        ++one->residence.holders;  // before room is made: these may not go
        uint64_t & sum = one->residence.in_main_memory ? missing_in_main_memory : missing;
        sum += one->residence.counted ? 0 : one->size();
    }
    if (!make_room(missing)) {
        let_go(wanted);
        throw std::runtime_error(
            "it has no room for " + in_megabytes(missing) + " of weights (" + in_megabytes(unused()) +
            " were free for this engine)"
        );
    }
    if (!make_main_memory_room(missing_in_main_memory)) {
        let_go(wanted);
        throw std::runtime_error(
            "it has no room for " + in_megabytes(missing_in_main_memory) +
            " of weights in main memory (it may use " + in_megabytes(main_memory_quota_) + ")"
        );
    }
    for (weight * one : wanted) {
        uint64_t & sum = one->residence.in_main_memory ? main_memory_resident_ : resident_;
        sum += one->residence.counted ? 0 : one->size();
        one->residence.counted = true;
    }
    return {this, std::move(wanted)};
}

void store::release(const std::vector<weight *> & held) {
    const std::lock_guard lock(mutex_);
    let_go(held);
}

void store::let_go(const std::vector<weight *> & held) {
    for (weight * one : held) {
        if (--one->residence.holders == 0) {
            one->residence.idle_since = ++clock_;
        }
    }
}

uint64_t store::prepare(
    const std::string & fingerprint, int first, int last,
    const std::function<void(uint64_t done, uint64_t total)> & progress
) {
    model_weights & model = find_model(fingerprint);
    std::vector<weight *> wanted = model.layers(first, last);
    {
        const std::lock_guard lock(mutex_);
        place(model, first, last);
    }
    const uint64_t total = sum_of_sizes(wanted);
    const weight_lease lease = hold(std::vector<weight *>(wanted));
    uint64_t done = 0;
    for (weight * one : wanted) {
        one->settle();
        done += one->size();
        progress(done, total);
    }
    return total;
}

uint64_t store::unload(const std::string & fingerprint) {
    model_weights & model = find_model(fingerprint);
    const std::lock_guard lock(mutex_);
    const uint64_t before = resident_ + main_memory_resident_;
    for (weight * one : model.all()) {
        if (one->residence.counted && one->residence.holders == 0) {
            evict(one);
        }
    }
    return before - resident_ - main_memory_resident_;
}

uint64_t store::resident() {
    const std::lock_guard lock(mutex_);
    return resident_ + main_memory_resident_;
}

// Drops idle weights until `bytes` fit, and saved states where that is not enough; nothing where neither is.
bool store::make_room(uint64_t bytes) {
    const auto fits = [&](uint64_t resident, uint64_t rooms) {
        return bytes <= quota_ && taken_ + resident + rooms <= quota_ - bytes;
    };
    if (fits(resident_, set_aside_size())) {
        return true;
    }
    const std::vector<weight *> idle = idle_weights();
    if (!fits(resident_ - sum_of_sizes(idle), 0)) {
        return false;
    }
    if (!fits(resident_ - sum_of_sizes(idle), set_aside_size())) {
        for (const auto & room : rooms_) {
            room->give_up();
        }
        rooms_.clear();
    }
    for (auto next = idle.begin(); !fits(resident_, set_aside_size()); ++next) {
        evict(*next);
    }
    return true;
}

bool store::make_main_memory_room(uint64_t bytes) {
    for (weight * one : idle_weights(true)) {
        if (main_memory_resident_ + bytes > main_memory_quota_) {
            evict(one);
        }
    }
    return main_memory_resident_ + bytes <= main_memory_quota_;
}

// The longest idle ones first.
std::vector<weight *> store::idle_weights(bool in_main_memory) const {
    std::vector<weight *> idle;
    for (const auto & model : models_) {
        for (weight * one : model.second->all()) {
            if (one->residence.counted && one->residence.holders == 0 &&
                one->residence.in_main_memory == in_main_memory) {
                idle.push_back(one);
            }
        }
    }
    std::sort(idle.begin(), idle.end(), [](const weight * a, const weight * b) {
        return a->residence.idle_since < b->residence.idle_since;
    });
    return idle;
}

void store::evict(weight * idle) {
    idle->drop();
    idle->residence.counted = false;
    (idle->residence.in_main_memory ? main_memory_resident_ : resident_) -= idle->size();
}

}  // namespace mesh
