//! `lily bench`: tokens per second of prefill and decode, at given context lengths.
//!
//! Each round fills one sequence with ids that depend on nothing but their place, then decodes
//! further ones. The last logits of every round must be the same, or the numbers mean nothing.

use crate::args::{DeviceArgs, MemoryArgs, ModelArgs};
use crate::error::Error;
use crate::load::{self, Source};
use crate::{machine, progress};
use clap::{Args, ValueEnum};
use lily_model::{Model, Outputs, Span};
use serde::Serialize;
use std::io::Write;
use std::time::Instant;

/// What to measure.
#[derive(Args, Debug)]
pub struct Bench {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    memory: MemoryArgs,
    /// Context lengths in tokens: each is prefilled, then decoded from
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', default_value = "128,512")]
    context: Vec<usize>,
    /// Tokens to decode after each context
    #[arg(long, value_name = "N", default_value_t = 32, allow_negative_numbers = true)]
    decode: usize,
    /// Rounds; the median counts, the first round before them warms up
    #[arg(long, value_name = "N", default_value_t = 3, allow_negative_numbers = true, value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: u16,
    /// Form of the rows on stdout
    #[arg(long, value_enum, default_value_t = Format::Csv)]
    format: Format,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    /// A heading, then a line for each context.
    Csv,
    /// A JSON object on each line.
    Jsonl,
}

/// One line of the record. Rates are medians over the rounds, with the slowest and fastest.
#[derive(Serialize)]
struct Row {
    context: usize,
    prefill_tokens_per_s: f64,
    prefill_min: f64,
    prefill_max: f64,
    decode_tokens: usize,
    decode_tokens_per_s: f64,
    decode_min: f64,
    decode_max: f64,
    rounds: u16,
    /// The most likely id after the last token, for comparing devices.
    last_id: usize,
    checkpoint: String,
    kv: String,
    device: String,
    processor: String,
    system: String,
    commit: &'static str,
}

/// Prints one row for each context to stdout.
pub fn run(args: Bench) -> Result<(), Error> {
    let longest = args.context.iter().copied().max().unwrap_or(0);
    if args.context.contains(&0) || args.decode == 0 {
        return Err(Error::Usage("--context and --decode: give at least one token".into()));
    }
    let needed = longest.saturating_add(args.decode);
    let mut memory = args.memory.clone();
    memory.max_seq.get_or_insert(u32::try_from(needed).unwrap_or(u32::MAX));
    let source = Source::open(&args.model)?;
    let most = source.config().max_positions;
    if needed > most {
        return Err(Error::Usage(format!(
            "--context {longest} and --decode {} need {needed} positions; this model has {most}",
            args.decode
        )));
    }
    let options = load::options(source.config(), &memory, 1)?;
    if needed > options.max_seq {
        return Err(Error::Usage(format!(
            "--context {longest} and --decode {} need {needed} positions; --max-seq is {}",
            args.decode, options.max_seq
        )));
    }
    let mut model = load::model(&source, &args.device, options, args.memory.force)?;
    let bar = progress::count("rounds", args.context.len() as u64 * (u64::from(args.rounds) + 1));
    for (i, &context) in args.context.iter().enumerate() {
        let (mut prefill, mut decode, mut seen) = (Vec::new(), Vec::new(), None);
        for round in 0..=args.rounds {
            let measured = measure(&mut model, context, args.decode)?;
            bar.inc(1);
            if *seen.get_or_insert(measured.logits.clone()) != measured.logits {
                return Err(Error::Failed(format!(
                    "context {context}: round {round} gave other logits than the rounds before"
                )));
            }
            if round > 0 {
                prefill.push(measured.prefill);
                decode.push(measured.decode);
            }
        }
        let (prefill, decode) = (Spread::of(prefill), Spread::of(decode));
        let logits = seen.unwrap_or_default();
        let last = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
        let row = Row {
            context,
            prefill_tokens_per_s: prefill.median,
            prefill_min: prefill.min,
            prefill_max: prefill.max,
            decode_tokens: args.decode,
            decode_tokens_per_s: decode.median,
            decode_min: decode.min,
            decode_max: decode.max,
            rounds: args.rounds,
            last_id: last.unwrap_or(0),
            checkpoint: source.id.clone(),
            kv: format!("{:?}", args.memory.kv).to_lowercase(),
            device: model.device(),
            processor: machine::processor().0,
            system: machine::system(),
            commit: env!("LILY_COMMIT"),
        };
        bar.suspend(|| print(&row, args.format, i == 0))?;
    }
    bar.finish_and_clear();
    Ok(())
}

/// Rates of one round, in tokens per second, and the logits it ended with.
struct Measured {
    prefill: f64,
    decode: f64,
    logits: Vec<f32>,
}

fn measure(model: &mut Model, context: usize, decode: usize) -> Result<Measured, Error> {
    let vocab = model.config().vocab;
    let ids: Vec<u32> = (0..context + decode).map(|i| id(i, vocab)).collect();
    let (prompt, reply) = ids.split_at(context);
    model.reset(0);
    let start = Instant::now();
    let chunks = prompt.len().div_ceil(model.chunk());
    for (i, ids) in prompt.chunks(model.chunk()).enumerate() {
        let outputs = if i + 1 == chunks { Outputs::Last } else { Outputs::None };
        step(model, ids, outputs)?;
    }
    let prefill = context as f64 / start.elapsed().as_secs_f64();
    let start = Instant::now();
    let mut logits = Vec::new();
    for id in reply {
        logits = step(model, std::slice::from_ref(id), Outputs::Last)?;
    }
    Ok(Measured { prefill, decode: decode as f64 / start.elapsed().as_secs_f64(), logits })
}

/// One forward pass, waited for.
fn step(model: &mut Model, ids: &[u32], outputs: Outputs) -> Result<Vec<f32>, Error> {
    let span = Span { slot: 0, ids, outputs };
    let ticket = model.step(&[span], &mut || true).expect("nobody stops this step");
    Ok(model.logits(ticket)?.to_vec())
}

/// The id at place `i`: spread over the vocabulary, the same on every machine.
fn id(i: usize, vocab: usize) -> u32 {
    ((i as u64 * 2_654_435_761) % (1 << 32) % vocab as u64) as u32
}

struct Spread {
    median: f64,
    min: f64,
    max: f64,
}

impl Spread {
    /// Of at least one value.
    fn of(mut values: Vec<f64>) -> Spread {
        values.sort_by(f64::total_cmp);
        let n = values.len();
        let median = (values[(n - 1) / 2] + values[n / 2]) / 2.0;
        Spread { median, min: values[0], max: values[n - 1] }
    }
}

fn print(row: &Row, format: Format, heading: bool) -> Result<(), Error> {
    let json = serde_json::to_value(row).expect("a row of strings and numbers");
    let mut stdout = std::io::stdout();
    match format {
        Format::Jsonl => writeln!(stdout, "{json}")?,
        Format::Csv => {
            let fields = json.as_object().expect("a row is an object");
            if heading {
                writeln!(stdout, "{}", fields.keys().cloned().collect::<Vec<_>>().join(","))?;
            }
            let cell = |value: &serde_json::Value| match value {
                serde_json::Value::String(s) => format!("\"{}\"", s.replace('"', "\"\"")),
                serde_json::Value::Number(n) if n.is_f64() => {
                    format!("{:.2}", n.as_f64().unwrap_or_default())
                }
                other => other.to_string(),
            };
            writeln!(stdout, "{}", fields.values().map(cell).collect::<Vec<_>>().join(","))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_the_same_everywhere() {
        assert_eq!([0, 1, 2, 3].map(|i| id(i, 248_320)), [0, 143_281, 13_666, 156_947]);
    }

    #[test]
    fn the_median_of_an_even_number_lies_between() {
        let spread = Spread::of(vec![4.0, 1.0, 2.0, 3.0]);
        assert_eq!((spread.median, spread.min, spread.max), (2.5, 1.0, 4.0));
    }
}
