//! Words for people, on stderr. Nobody may be listening (a full disk, a closed pipe): that is no
//! reason to fail, and less to panic, as `eprintln!` does. Nothing else in this crate writes there
//! but progress bars.

/// Writes a line to stderr; what goes wrong is ignored.
macro_rules! say {
    ($($arg:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($arg)*);
    }};
}

/// As [`say!`], without the line break.
macro_rules! say_on {
    ($($arg:tt)*) => {{
        use std::io::Write as _;
        let _ = write!(std::io::stderr(), $($arg)*);
    }};
}
