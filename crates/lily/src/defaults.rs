//! The checkpoint's generation_config.json: how tokens are chosen where nobody says, and which
//! ids end a reply.

use crate::args::SamplingArgs;
use crate::error::Error;
use lily_checkpoint::Config;
use lily_engine::Sampling;
use serde::Deserialize;

/// What the checkpoint's authors recommend.
#[derive(Clone, Debug, PartialEq)]
pub struct Defaults {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Ids that end a reply: of generation_config.json and config.json together.
    pub stop_ids: Vec<u32>,
}

/// The fields that are read; others are for training or for other engines.
#[derive(Default, Deserialize)]
struct File {
    do_sample: Option<bool>,
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    eos_token_id: Option<Ids>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(u32),
    Many(Vec<u32>),
}

impl Defaults {
    /// From the text of generation_config.json, where the checkpoint has one. Without one, or
    /// with `do_sample` false, the default is greedy.
    pub fn new(generation_config: Option<&str>, config: &Config) -> Result<Defaults, Error> {
        let file: File = match generation_config {
            None => File::default(),
            Some(text) => serde_json::from_str(text).map_err(|e| {
                Error::Failed(format!("generation_config.json: {e}; `lily pull` fetches it again"))
            })?,
        };
        let greedy = Sampling::default();
        let sampled = file.do_sample.unwrap_or(file.temperature.is_some());
        let sampling = Sampling {
            temperature: if sampled { file.temperature.unwrap_or(1.0) } else { 0.0 },
            top_k: file.top_k.unwrap_or(greedy.top_k),
            top_p: file.top_p.unwrap_or(greedy.top_p),
            min_p: file.min_p.unwrap_or(greedy.min_p),
            repetition_penalty: file.repetition_penalty.unwrap_or(greedy.repetition_penalty),
            ..greedy
        };
        sampling.check().map_err(|e| Error::Failed(format!("generation_config.json: {e}")))?;
        let mut stop_ids = match file.eos_token_id {
            None => Vec::new(),
            Some(Ids::One(id)) => vec![id],
            Some(Ids::Many(ids)) => ids,
        };
        stop_ids.extend(&config.stop_ids);
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
        assert!(Defaults::new(Some("{"), &Config::full()).is_err());
        assert!(Defaults::new(Some(r#"{"temperature": -1}"#), &Config::full()).is_err());
    }
}
