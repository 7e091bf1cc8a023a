//! Which uses of one storage fit, by the table in docs/semantics.md: an oracle of its own.

use super::files::{BASE, Form, Kind};

/// A use of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    Read,
    ReadImage,
    Write,
    WriteImage,
    CopyTarget,
}

/// A use with its user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    pub file: usize,
    pub usage: Use,
    pub owner: String,
}

impl Use {
    pub fn of(kind: Kind, form: Form, writes: bool) -> Use {
        match (kind, form, writes) {
            (_, Form::Made, _) => Use::ReadImage,
            (Kind::Raw, ..) | (_, Form::Bytes, _) => [Use::Read, Use::Write][usize::from(writes)],
            (.., writes) => [Use::ReadImage, Use::WriteImage][usize::from(writes)],
        }
    }

    pub fn writes(self) -> bool {
        matches!(self, Use::Write | Use::WriteImage | Use::CopyTarget)
    }
}

/// All files that a device uses.
pub fn all(file: usize, kind: Kind, form: Form, usage: Use, owner: &str) -> Vec<Held> {
    let held = |file, usage| Held { file, usage, owner: owner.to_string() };
    let mut all = vec![held(file, usage)];
    if kind == Kind::Overlay && form == Form::Own {
        all.push(held(BASE, Use::ReadImage));
    }
    all
}

/// Whether both may be there at a time.
pub fn fit(one: &Held, other: &Held) -> bool {
    use Use::{CopyTarget, Read, ReadImage, Write, WriteImage};
    if one.file != other.file {
        return true;
    }
    match (one.usage, other.usage) {
        (Read | ReadImage, Read | ReadImage) => true,
        (WriteImage | CopyTarget, Write | WriteImage | CopyTarget)
        | (Write, WriteImage | CopyTarget) => false,
        _ if one.owner == other.owner => true,
        (WriteImage | CopyTarget, _) | (_, WriteImage | CopyTarget) => false,
        (Write, Write | ReadImage) | (ReadImage, Write) => false,
        (Write, Read) | (Read, Write) => true,
    }
}
