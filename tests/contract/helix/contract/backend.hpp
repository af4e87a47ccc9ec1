// SPDX-License-Identifier: Apache-2.0
// The contract of every backend: each operation is compared with its definition in double, at edge sizes, and
// must not touch anything else. An engine runs these functions on its own backend, each from a Catch2 test
// case.
#pragma once

#include <helix/contract/attention.hpp>
#include <helix/contract/exchange.hpp>
#include <helix/contract/experts.hpp>
#include <helix/contract/kv_cache.hpp>
#include <helix/contract/layer.hpp>
#include <helix/contract/queue.hpp>
#include <helix/contract/vocabulary.hpp>
