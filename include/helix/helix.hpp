// SPDX-License-Identifier: Apache-2.0
// The core headers. Also include cpu/backend.hpp or a backend of your own. The rendezvous of processes
// (comm/) and the planner (plan/) have headers of their own.
#pragma once

#include <helix/backend.hpp>
#include <helix/batch_buffer.hpp>
#include <helix/decode_layer.hpp>
#include <helix/embed_tokens.hpp>
#include <helix/foreign_kv.hpp>
#include <helix/job_comms.hpp>
#include <helix/lse_combine.hpp>
#include <helix/page_ledger.hpp>
#include <helix/sharded_kv_cache.hpp>
#include <helix/topology.hpp>
#include <helix/version.hpp>
#include <helix/vocabulary_head.hpp>
