//! Every row of the table on the CPU device, on every instruction set that this machine has,
//! against its formula in f64, written here a second time. See [`harness`] for what each check
//! includes.

mod attention;
mod delta;
mod device;
mod experts;
mod harness;
mod linear;
mod rows;
