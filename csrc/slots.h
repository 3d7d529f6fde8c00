// SPDX-License-Identifier: Apache-2.0
// Page-locked buffers ("slots") for the copies of gradients and weights between device and host.
//
// A pool has no lock: the executor calls it with `mutex_` held. The pool owns the memory. A slot belongs to the task
// that has taken it. A stream may still read a slot after the task has returned it. The event `read_until` marks the
// end of this read, and the slot is used again only after this event.
#pragma once
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "streams.h"

namespace tf {

inline bool is_done(const EventRef& event) { return !event || event->state() == Event::kDone; }

// A page-locked buffer. A stream may still read it until `read_until`.
struct Slot {
  char* raw = nullptr;
  bool is_locked = false;
  EventRef read_until;
};

// Up to `limit` slots of equal size, which are allocated at first use.
class SlotPool {
 public:
  SlotPool(Driver& driver, int64_t slot_bytes, int32_t limit) : limit(limit), driver_(driver), bytes_(slot_bytes) {}
  ~SlotPool() { clear(); }
  void clear() {
    for (auto& slot : all_) driver_.free_pinned(slot->raw, bytes_, slot->is_locked);
    all_.clear();
    free_.clear();
  }
  Slot* take(bool may_grow, bool ignores_readers) {
    for (size_t i = 0; i < free_.size(); ++i) {
      if (ignores_readers || is_done(free_[i]->read_until)) {
        Slot* slot = free_[i];
        free_.erase(free_.begin() + i);
        slot->read_until.reset();
        return slot;
      }
    }
    return num_made() < limit || may_grow ? make() : nullptr;
  }
  void give(Slot* slot, EventRef read_until) {
    slot->read_until = std::move(read_until);
    free_.push_back(slot);
  }
  void add(int32_t num_more) {
    for (; num_more > 0; --num_more)
      if (Slot* slot = make()) free_.push_back(slot);
  }
  // Whether a stream still uses a slot that was returned, for example in the copy of a task that was dropped.
  bool has_readers() const {
    return std::any_of(free_.begin(), free_.end(), [](Slot* slot) { return !is_done(slot->read_until); });
  }
  void trim() {  // between steps
    while (!free_.empty() && num_made() > limit) {
      Slot* slot = free_.back();
      if (slot->read_until) slot->read_until->wait();
      free_.pop_back();
      driver_.free_pinned(slot->raw, bytes_, slot->is_locked);
      all_.erase(std::find_if(all_.begin(), all_.end(), [&](auto& one) { return one.get() == slot; }));
    }
  }
  int64_t num_made() const { return static_cast<int64_t>(all_.size()); }
  int64_t num_unlocked() const {
    return std::count_if(all_.begin(), all_.end(), [](auto& slot) { return !slot->is_locked; });
  }

  int32_t limit;

 private:
  Slot* make() {
    auto slot = std::make_unique<Slot>();
    slot->raw = static_cast<char*>(driver_.new_pinned(bytes_, &slot->is_locked));
    if (!slot->raw) return nullptr;
    all_.push_back(std::move(slot));
    return all_.back().get();
  }
  Driver& driver_;
  int64_t bytes_;
  std::vector<std::unique_ptr<Slot>> all_;
  std::vector<Slot*> free_;
};

}  // namespace tf
