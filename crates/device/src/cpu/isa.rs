//! The instruction sets of the CPU device: their names, which of them this machine has, and the
//! inner loops of each. The one place where they are chosen.

use super::kernels::Kernels;
#[cfg(target_arch = "aarch64")]
use super::neon;
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::device::Error;
use std::fmt;
use std::str::FromStr;

/// An instruction set that the CPU device has kernels for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// None in particular: the definition of every operation, slow and exact.
    Scalar,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
    /// 64-bit Arm.
    Neon,
}

/// All of them, slowest first.
const ALL: &[Isa] = &[Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Neon];

impl Isa {
    /// Its kernels, if this machine can run it; `scalar` needs none.
    fn detect(self) -> Option<Option<&'static Kernels>> {
        match self {
            Isa::Scalar => Some(None),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"))
                .then_some(Some(&avx2::KERNELS)),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => (is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma"))
            .then_some(Some(&avx512::KERNELS)),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => {
                std::arch::is_aarch64_feature_detected!("neon").then_some(Some(&neon::KERNELS))
            }
            #[allow(unreachable_patterns)] // the sets of other architectures
            _ => None,
        }
    }
}

/// The instruction sets this machine has, slowest first.
pub fn available() -> Vec<Isa> {
    ALL.iter().copied().filter(|isa| isa.detect().is_some()).collect()
}

/// The one asked for or the fastest, with its kernels. Errs when the machine lacks it.
pub(super) fn choose(asked: Option<Isa>) -> Result<(Isa, Option<&'static Kernels>), Error> {
    let available = available();
    let isa = asked.unwrap_or(*available.last().expect("scalar is always there"));
    match isa.detect() {
        Some(kernels) => Ok((isa, kernels)),
        None => Err(Error::Unsupported(format!(
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
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Neon => "neon",
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_that_the_machine_lacks_is_refused_with_what_it_has() {
        let lacking = ALL.iter().copied().find(|isa| isa.detect().is_none());
        let lacking = lacking.expect("no machine has the sets of two architectures");
        let error = choose(Some(lacking)).err().expect("refused").to_string();
        assert!(error.starts_with(&format!("--isa {lacking}: ")), "{error}");
        assert!(error.ends_with(&names(&available())), "{error}");
    }
}
