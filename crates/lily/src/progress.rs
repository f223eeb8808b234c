//! Progress bars on stderr. They show only where stderr is a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar that counts bytes, with rate and time left.
pub fn bytes(title: &str, total: u64) -> ProgressBar {
    bar(title, total, "{msg} {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left")
}

/// A bar that counts things.
pub fn count(title: &str, total: u64) -> ProgressBar {
    bar(title, total, "{msg} {wide_bar} {pos} of {len}")
}

fn bar(title: &str, total: u64, template: &str) -> ProgressBar {
    let style = ProgressStyle::with_template(template).expect("the template is a constant");
    let target = ProgressDrawTarget::stderr();
    ProgressBar::with_draw_target(Some(total), target)
        .with_style(style)
        .with_message(title.to_owned())
}
