//! Properties of exports by the words that nbdinfo has for them.

use blockhaul_wire::{ExportFlags, ReplyForm};

use crate::report::{ExportOwner, InspectionReport};

/// A property of an export or its server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ability {
    /// A client can connect and read: true for every export that answers.
    Always,
    /// The export is not read-only.
    Write,
    /// The connection is encrypted.
    Tls,
    /// Structured replies, or extended ones.
    Structured,
    /// Extended headers.
    Extended,
    /// A flag of the export.
    Flag(ExportFlags),
}

/// The words of nbdinfo; `-` matches itself, `_` and, in the first three rows, a blank.
const WORDS: &[(&[&str], bool, Ability)] = &[
    (&["sr", "structured", "structured-reply", "structured-replies"], true, Ability::Structured),
    (&["eh", "extended", "extended-header", "extended-headers"], true, Ability::Extended),
    (&["block-status-payload"], true, Ability::Flag(ExportFlags::BLOCK_STATUS_PAYLOAD)),
    (&["read", "connect"], false, Ability::Always),
    (&["write"], false, Ability::Write),
    (&["tls"], false, Ability::Tls),
    (&["readonly", "read-only"], false, Ability::Flag(ExportFlags::READ_ONLY)),
    (&["rotational"], false, Ability::Flag(ExportFlags::ROTATIONAL)),
    (&["cache"], false, Ability::Flag(ExportFlags::SEND_CACHE)),
    (&["df"], false, Ability::Flag(ExportFlags::SEND_DF)),
    (&["fastzero", "fast-zero"], false, Ability::Flag(ExportFlags::SEND_FAST_ZERO)),
    (&["flush"], false, Ability::Flag(ExportFlags::SEND_FLUSH)),
    (&["fua"], false, Ability::Flag(ExportFlags::SEND_FUA)),
    (&["multiconn", "multi-conn"], false, Ability::Flag(ExportFlags::CAN_MULTI_CONN)),
    (&["trim"], false, Ability::Flag(ExportFlags::SEND_TRIM)),
    (&["zero"], false, Ability::Flag(ExportFlags::SEND_WRITE_ZEROES)),
];

impl Ability {
    /// The property of this name, in either case; `None` for unknown names. [`Ability::names`] has them.
    pub fn parse(word: &str) -> Option<Ability> {
        let lower = word.to_ascii_lowercase();
        let dashes = lower.replace('_', "-");
        let blanks = lower.replace(['_', ' '], "-");
        let found = WORDS.iter().find(|(words, blank, _)| {
            words.contains(&if *blank { blanks.as_str() } else { dashes.as_str() })
        });
        found.map(|row| row.2)
    }

    /// A name of each property.
    pub fn names() -> impl Iterator<Item = &'static str> {
        WORDS.iter().flat_map(|row| row.0.last()).copied()
    }

    /// Whether all exports of a server have the property, or none: [`Inspection::server`](crate::Inspection::server)
    /// reports it.
    pub fn is_of_server(self) -> bool {
        matches!(self, Ability::Always | Ability::Tls | Ability::Structured | Ability::Extended)
    }

    /// Whether the first export of a report has the property.
    pub fn is_in(self, report: &InspectionReport) -> bool {
        let flags = report.exports.first().map_or(ExportFlags::NONE, |export| export.flags);
        let (tls, replies) = match &report.owner {
            ExportOwner::Server { tls, replies, .. } => (*tls, *replies),
            ExportOwner::Device { .. } => (false, ReplyForm::Simple),
        };
        match self {
            Ability::Always => true,
            Ability::Write => !flags.contains(ExportFlags::READ_ONLY),
            Ability::Tls => tls,
            Ability::Structured => replies != ReplyForm::Simple,
            Ability::Extended => replies == ReplyForm::Extended,
            Ability::Flag(flag) => flags.contains(flag),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_have_nbdinfos_spellings() {
        let payload = Ability::Flag(ExportFlags::BLOCK_STATUS_PAYLOAD);
        for word in ["block status payload", "BLOCK_status-payload", "block-status-payload"] {
            assert_eq!(Ability::parse(word), Some(payload), "{word}");
        }
        assert_eq!(Ability::parse("Structured Replies"), Some(Ability::Structured));
        assert_eq!(Ability::parse("READ_ONLY"), Some(Ability::Flag(ExportFlags::READ_ONLY)));
        for word in ["", "foo", "fast zero", "writes"] {
            assert_eq!(Ability::parse(word), None, "{word}");
        }
    }
}
