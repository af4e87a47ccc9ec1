// SPDX-License-Identifier: Apache-2.0
// Everything but the backends: include this and cpu/backend.hpp (or your own).
#pragma once

#include <helix/backend.hpp>
#include <helix/batch_buffer.hpp>
#include <helix/decode_layer.hpp>
#include <helix/dtype.hpp>
#include <helix/error.hpp>
#include <helix/hop_b.hpp>
#include <helix/kv_layout.hpp>
#include <helix/kvp_all_to_all.hpp>
#include <helix/layer_weights.hpp>
#include <helix/lse.hpp>
#include <helix/lse_combine.hpp>
#include <helix/page_ledger.hpp>
#include <helix/partial_attention.hpp>
#include <helix/sharded_kv_cache.hpp>
#include <helix/tensor_view.hpp>
#include <helix/topology.hpp>
#include <helix/vocabulary.hpp>
#include <helix/workspace.hpp>
