//! The checkpoint's generation_config.json: how tokens are chosen where nobody says, and which
//! ids end a reply.

use crate::args::SamplingArgs;
use crate::error::Error;
use crate::load::Source;
use lily_checkpoint::Config;
use lily_engine::Sampling;
use serde_json::{Map, Value};

const NAME: &str = "generation_config.json";

fn bad(problem: String) -> Error {
    Error::Failed(format!("{NAME}: {problem}; `lily pull` fetches it again"))
}

/// A value out of the file, short enough for a message.
fn shown(value: &Value) -> String {
    value.to_string().chars().take(60).collect()
}

/// What the checkpoint's authors recommend.
#[derive(Clone, Debug, PartialEq)]
pub struct Defaults {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Ids that end a reply: of generation_config.json and config.json together.
    pub stop_ids: Vec<u32>,
}

impl Defaults {
    /// Those of a checkpoint.
    pub fn open(source: &Source) -> Result<Defaults, Error> {
        Defaults::new(source.files.text(NAME)?.as_deref(), source.config())
    }

    /// From the text of generation_config.json, where the checkpoint has one. Without one, or
    /// with `do_sample` false, the default is greedy. Fields that are for training or for other
    /// engines are ignored.
    fn new(text: Option<&str>, config: &Config) -> Result<Defaults, Error> {
        let file: Value = match text {
            None => Value::Object(Map::new()),
            Some(text) => serde_json::from_str(text).map_err(|e| bad(format!("not JSON: {e}")))?,
        };
        let Some(file) = file.as_object() else {
            return Err(bad(format!("expected a JSON object, found {}", shown(&file))));
        };
        let number = |name: &str| match file.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => (value.as_f64().map(|number| Some(number as f32)))
                .ok_or_else(|| bad(format!("{name}: expected a number, found {}", shown(value)))),
        };
        let top_k = number("top_k")?.unwrap_or(0.0);
        if top_k < 0.0 || top_k.fract() != 0.0 {
            return Err(bad(format!("top_k: expected a number from 0 on, found {top_k}")));
        }
        let temperature = number("temperature")?;
        let sampled = match file.get("do_sample") {
            None | Some(Value::Null) => temperature.is_some(),
            Some(value) => (value.as_bool()).ok_or_else(|| {
                bad(format!("do_sample: expected true or false, found {}", shown(value)))
            })?,
        };
        let greedy = Sampling::default();
        let sampling = Sampling {
            temperature: if sampled { temperature.unwrap_or(1.0) } else { 0.0 },
            top_k: top_k as usize,
            top_p: number("top_p")?.unwrap_or(greedy.top_p),
            min_p: number("min_p")?.unwrap_or(greedy.min_p),
            repetition_penalty: (number("repetition_penalty")?)
                .unwrap_or(greedy.repetition_penalty),
            ..greedy
        };
        sampling.check().map_err(|e| bad(e.to_string()))?;
        let listed = match file.get("eos_token_id") {
            None | Some(Value::Null) => &[],
            Some(Value::Array(ids)) => ids.as_slice(),
            Some(id) => std::slice::from_ref(id),
        };
        let mut stop_ids = config.stop_ids.clone();
        for id in listed {
            let known = id.as_u64().filter(|&id| id < config.vocab as u64);
            let known = known.and_then(|id| u32::try_from(id).ok());
            stop_ids.push(known.ok_or_else(|| {
                let vocab = config.vocab;
                bad(format!("eos_token_id: expected ids below {vocab}, found {}", shown(id)))
            })?);
        }
        stop_ids.sort_unstable();
        stop_ids.dedup();
        Ok(Defaults { sampling, stop_ids })
    }

    /// The defaults with what the flags say instead. Errs where a flag is out of its range.
    pub fn with(&self, args: &SamplingArgs) -> Result<Sampling, Error> {
        let d = &self.sampling;
        let sampling = Sampling {
            temperature: args.temperature.unwrap_or(d.temperature),
            top_k: args.top_k.map_or(d.top_k, |k| k as usize),
            top_p: args.top_p.unwrap_or(d.top_p),
            min_p: args.min_p.unwrap_or(d.min_p),
            presence_penalty: args.presence_penalty.unwrap_or(d.presence_penalty),
            frequency_penalty: args.frequency_penalty.unwrap_or(d.frequency_penalty),
            repetition_penalty: args.repetition_penalty.unwrap_or(d.repetition_penalty),
            seed: args.seed.or(d.seed),
            logit_bias: d.logit_bias.clone(),
        };
        sampling
            .check()
            .map_err(|e| Error::Usage(format!("--{}", e.to_string().replace('_', "-"))))?;
        Ok(sampling)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_say_what_flags_leave_out() {
        let config = Config::full();
        let text = r#"{"do_sample": true, "temperature": 1.0, "top_k": 20, "top_p": 0.95,
                       "eos_token_id": [248046, 248044], "pad_token_id": 248044}"#;
        let defaults = Defaults::new(Some(text), &config).unwrap();
        assert_eq!(defaults.stop_ids, [248_044, 248_046]);
        assert_eq!((defaults.sampling.top_k, defaults.sampling.top_p), (20, 0.95));
        let args =
            SamplingArgs { temperature: Some(0.0), seed: Some(7), ..SamplingArgs::default() };
        let sampling = defaults.with(&args).unwrap();
        assert_eq!((sampling.temperature, sampling.top_k, sampling.seed), (0.0, 20, Some(7)));
        let args = SamplingArgs { min_p: Some(2.0), ..SamplingArgs::default() };
        let error = defaults.with(&args).unwrap_err().to_string();
        assert!(error.starts_with("--min-p: expected"), "{error}");
    }

    #[test]
    fn without_the_file_the_best_token_is_taken() {
        let defaults = Defaults::new(None, &Config::full()).unwrap();
        assert_eq!(defaults.sampling, Sampling::default());
        assert_eq!(defaults.stop_ids, [248_044, 248_046]);
        for (text, words) in [
            ("{", "not JSON"),
            ("[]", "expected a JSON object, found []"),
            (r#"{"temperature": -1}"#, "temperature: expected"),
            (r#"{"top_k": 1.5}"#, "top_k: expected"),
            (r#"{"top_p": "x"}"#, "top_p: expected a number"),
            (r#"{"eos_token_id": -1}"#, "eos_token_id: expected ids below 248320, found -1"),
            (r#"{"eos_token_id": [1, 248320]}"#, "found 248320"),
        ] {
            let error = Defaults::new(Some(text), &Config::full()).unwrap_err().to_string();
            assert!(
                error.starts_with("generation_config.json: ") && error.contains(words),
                "{error}"
            );
        }
    }
}
