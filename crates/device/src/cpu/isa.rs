//! The instruction sets of the CPU device: their names, and which of them this machine has.

use crate::device::Error;
use std::fmt;
use std::str::FromStr;

/// An instruction set that the CPU device has kernels for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// None in particular: the definition of every operation, slow and exact.
    Scalar,
}

/// All of them, slowest first.
const ALL: &[Isa] = &[Isa::Scalar];

impl Isa {
    /// Whether this machine can run it.
    fn present(self) -> bool {
        match self {
            Isa::Scalar => true,
        }
    }
}

/// The instruction sets this machine has, slowest first.
pub fn available() -> Vec<Isa> {
    ALL.iter().copied().filter(|isa| isa.present()).collect()
}

/// The one asked for, or the fastest. Errs when the machine lacks it.
pub fn choose(asked: Option<Isa>) -> Result<Isa, Error> {
    let available = available();
    match asked {
        None => Ok(*available.last().expect("scalar is always there")),
        Some(isa) if available.contains(&isa) => Ok(isa),
        Some(isa) => Err(Error::Unsupported(format!(
            "--isa {isa}: this machine cannot run it; it has {}",
            names(&available)
        ))),
    }
}

fn names(isas: &[Isa]) -> String {
    isas.iter().map(Isa::to_string).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Scalar => "scalar",
        })
    }
}

impl FromStr for Isa {
    type Err = Error;

    fn from_str(name: &str) -> Result<Isa, Error> {
        ALL.iter().copied().find(|isa| isa.to_string() == name).ok_or_else(|| {
            Error::Unsupported(format!("no instruction set {name:?}; there are {}", names(ALL)))
        })
    }
}
