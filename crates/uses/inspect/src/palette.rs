//! Colours of text for terminals.

/// The escape sequences of nbdinfo; empty without colours.
pub(crate) struct Palette {
    /// The head of an export.
    pub head: &'static str,
    /// True, clean.
    pub good: &'static str,
    /// False, dirty.
    pub bad: &'static str,
    /// Ranges of data.
    pub data: &'static str,
    /// Ranges of the top image.
    pub local: &'static str,
    /// Ranges of the images below.
    pub backing: &'static str,
    /// Back to normal.
    pub reset: &'static str,
}

impl Palette {
    /// Colours, or none.
    pub(crate) fn new(color: bool) -> Palette {
        if color {
            Palette {
                head: "\x1b[1;35m",
                good: "\x1b[22;32m",
                bad: "\x1b[22;31m",
                data: "\x1b[1;30m",
                local: "\x1b[1;37m\x1b[40m",
                backing: "\x1b[47m",
                reset: "\x1b[0m",
            }
        } else {
            Palette { head: "", good: "", bad: "", data: "", local: "", backing: "", reset: "" }
        }
    }
}
