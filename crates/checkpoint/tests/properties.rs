//! Laws of the parsers over inputs that chance makes: what is written reads back, and what is
//! spoiled is an error, never a panic.

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use proptest::sample::{Index, select};

use lily_checkpoint::safetensors::{element_bits, encode_header, header_bytes, parse_header};
use lily_checkpoint::shards::parse_index;
use lily_checkpoint::tensors::{Tensor, table};
use lily_checkpoint::{Config, Error, fuzzing};

/// Tensors by name: dtype and shape.
fn tensors() -> impl Strategy<Value = Vec<(String, &'static str, Vec<usize>)>> {
    let dtype = select(vec!["U32", "BF16", "F32", "I8", "F4", "F6_E2M3", "BOOL", "C64"]);
    btree_map(any::<String>(), (dtype, vec(0usize..9, 0..4)), 0..12).prop_map(|tensors| {
        let mut tensors: Vec<_> = tensors.into_iter().map(|(n, (d, s))| (n, d, s)).collect();
        tensors.retain(|(name, ..)| name != "__metadata__");
        tensors
    })
}

fn encode(tensors: &[(String, &'static str, Vec<usize>)], spaces: usize) -> (Vec<u8>, u64) {
    let header = encode_header(tensors.iter().map(|(n, d, s)| (n.as_str(), *d, &s[..])), spaces);
    let data = tensors
        .iter()
        .map(|(_, d, s)| {
            (s.iter().product::<usize>() as u64 * element_bits(d).unwrap()).div_ceil(8)
        })
        .sum::<u64>();
    let file_bytes = header.len() as u64 + data;
    (header, file_bytes)
}

/// Configs whose sizes keep the relations that the engine relies on.
fn config() -> impl Strategy<Value = Config> {
    let mixer = (1..9usize, 1..9usize, 1..65usize, 1..9usize, 1..9usize, 1..5usize);
    let experts = (1..300usize, any::<Index>(), 1..20usize);
    let rest = (1..5000usize, 1..40usize, 1..50usize, 1..9usize, 1e-8f32..1e-2, 1..1_000_000usize);
    let ids = vec(any::<Index>(), 1..5);
    (mixer, experts, rest, ids, any::<Index>(), 10f64..1e9).prop_map(
        |(mixer, experts, rest, ids, rotary, rope_theta)| {
            let (kv_heads, group, head, delta_k_heads, delta_group, delta_head) = mixer;
            let (vocab, dim, layers, attention_every, eps, max_positions) = rest;
            let head_dim = 64 * head;
            let mut stop_ids: Vec<u32> = ids.iter().map(|id| id.index(vocab) as u32).collect();
            stop_ids.sort_unstable();
            stop_ids.dedup();
            Config {
                vocab,
                dim: 64 * dim,
                layers,
                attention_every,
                q_heads: kv_heads * group,
                kv_heads,
                head_dim,
                rotary_dim: 2 * (1 + rotary.index(head_dim / 2)),
                rope_theta: rope_theta.round(),
                delta_k_heads,
                delta_v_heads: delta_k_heads * delta_group,
                delta_head_dim: 64 * delta_head,
                experts: experts.0,
                experts_per_token: 1 + experts.1.index(experts.0),
                expert_hidden: 64 * experts.2,
                eps,
                max_positions,
                stop_ids,
            }
        },
    )
}

/// A value that no setting of a config expects, or that one does where chance will have it.
fn value() -> impl Strategy<Value = serde_json::Value> {
    prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        any::<u64>().prop_map(Into::into),
        (-3..300i64).prop_map(Into::into),
        any::<f64>().prop_map(Into::into),
        any::<String>().prop_map(Into::into),
        vec(any::<i8>(), 0..3).prop_map(Into::into),
        Just(serde_json::json!({})),
    ]
}

/// Every place in a JSON value, as pointers.
fn places(value: &serde_json::Value, path: String, out: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(object) => {
            for (key, value) in object {
                places(value, format!("{path}/{}", key.replace('~', "~0").replace('/', "~1")), out);
            }
        }
        serde_json::Value::Array(list) => {
            for (i, value) in list.iter().enumerate() {
                places(value, format!("{path}/{i}"), out);
            }
        }
        _ => (),
    }
    out.push(path);
}

proptest! {
    #[test]
    fn a_written_header_reads_back(tensors in tensors(), spaces in 0usize..9) {
        let (file, file_bytes) = encode(&tensors, spaces);
        let length = header_bytes(&file[..8], file_bytes).unwrap();
        let header = parse_header(&file[8..8 + length], file_bytes).unwrap();
        prop_assert_eq!(header.data_start, file.len() as u64);
        prop_assert_eq!(header.entries.len(), tensors.len());
        let mut end = 0;
        for (entry, (name, dtype, shape)) in header.entries.iter().zip(&tensors) {
            prop_assert_eq!((&entry.name, entry.dtype.as_str()), (name, *dtype));
            prop_assert!(entry.shape.iter().map(|&n| n as usize).eq(shape.iter().copied()));
            prop_assert_eq!(entry.range.start, end);
            end = entry.range.end;
        }
        prop_assert_eq!(header.data_start + end, file_bytes);
    }

    #[test]
    fn a_file_of_another_length_than_its_header_says_is_refused(
        tensors in tensors(),
        other in 0u64..2000,
    ) {
        let (file, file_bytes) = encode(&tensors, 0);
        prop_assume!(other != file_bytes);
        let refused = header_bytes(&file[..8], other)
            .map_err(|problem| vec![problem])
            .and_then(|length| parse_header(&file[8..8 + length], other));
        prop_assert!(refused.is_err());
    }

    #[test]
    fn moving_one_tensor_by_a_byte_is_refused(tensors in tensors(), which in any::<Index>()) {
        let (file, file_bytes) = encode(&tensors, 0);
        let mut header: serde_json::Value = serde_json::from_slice(&file[8..]).unwrap();
        let names: Vec<_> = tensors.iter().filter(|(.., s)| !s.contains(&0)).collect();
        prop_assume!(!names.is_empty());
        let offsets = &mut header[&names[which.index(names.len())].0]["data_offsets"];
        for i in 0..2 {
            offsets[i] = (offsets[i].as_u64().unwrap() + 1).into();
        }
        let json = header.to_string();
        let data = file_bytes - file.len() as u64;
        prop_assert!(parse_header(json.as_bytes(), 8 + json.len() as u64 + data).is_err());
    }

    #[test]
    fn a_spoiled_header_never_panics(
        tensors in tensors(),
        changes in vec((any::<Index>(), any::<u8>()), 1..6),
    ) {
        let (file, file_bytes) = encode(&tensors, 0);
        let mut input = file[7..].to_vec();
        input[0] = ((file_bytes - file.len() as u64) / 256) as u8;
        for (at, byte) in changes {
            let at = at.index(input.len());
            input[at] = byte;
        }
        fuzzing::safetensors_header(&input);
    }

    #[test]
    fn any_bytes_are_a_header_or_an_error(input in vec(any::<u8>(), 0..200)) {
        fuzzing::safetensors_header(&input);
        fuzzing::index(&input);
        fuzzing::config(&input);
    }

    #[test]
    fn an_index_reads_back(map in btree_map(any::<String>(), "[a-z0-9-]{1,9}", 1..20)) {
        let map: Vec<(String, String)> =
            map.into_iter().map(|(name, file)| (name, file + ".safetensors")).collect();
        prop_assume!(map.iter().all(|(name, _)| name != "__metadata__"));
        let weight_map: serde_json::Map<_, _> =
            map.iter().map(|(name, file)| (name.clone(), file.clone().into())).collect();
        let text = serde_json::json!({ "metadata": {"total_size": 1}, "weight_map": weight_map });
        prop_assert_eq!(parse_index(&text.to_string()).unwrap().weight_map, map);
    }

    #[test]
    fn an_index_never_leads_out_of_its_directory(file in any::<String>()) {
        let text = serde_json::json!({ "weight_map": { "a": file } }).to_string();
        fuzzing::index(text.as_bytes());
    }

    #[test]
    fn a_written_config_reads_back(config in config()) {
        prop_assert_eq!(&Config::from_json(&config.to_json()).unwrap(), &config);
        let table = table(&config);
        let mut names: Vec<_> = table.iter().map(|tensor| &tensor.name).collect();
        names.sort_unstable();
        names.dedup();
        prop_assert_eq!(names.len(), table.len());
        prop_assert!(table.iter().all(|tensor: &Tensor| tensor.bytes() > 0));
    }

    #[test]
    fn a_config_with_one_value_replaced_is_read_or_refused_in_words(
        config in config(),
        place in any::<Index>(),
        new in value(),
    ) {
        let mut json: serde_json::Value = serde_json::from_str(&config.to_json()).unwrap();
        let mut all = Vec::new();
        places(&json, String::new(), &mut all);
        *json.pointer_mut(&all[place.index(all.len())]).unwrap() = new;
        let text = json.to_string();
        fuzzing::config(text.as_bytes());
        if let Err(Error::Config(problems)) = Config::from_json(&text) {
            prop_assert!(problems.len() < 60, "{problems:?}");
        }
    }
}
