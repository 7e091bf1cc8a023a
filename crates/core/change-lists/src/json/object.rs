//! The members of one object.

use blockhaul_wire::printable;

/// Bytes of an object in a message.
const SHOWN_MAX: usize = 60;
/// Members with unknown names in an object.
const OTHERS_MAX: usize = 256;

/// The value of a member.
#[derive(Debug)]
pub(super) enum Member {
    Number(u64),
    Text(String),
    Null,
    /// An array whose entries were read.
    List,
    /// Something else, as JSON, perhaps shortened.
    Other(String),
}

impl Member {
    /// A number of bytes or blocks, which JSON made from protocol buffers writes as a string.
    pub(super) fn number(&self) -> Option<u64> {
        match self {
            Member::Number(number) => Some(*number),
            Member::Text(text) => text.parse().ok(),
            _ => None,
        }
    }

    /// The member in a message.
    pub(super) fn shown(&self) -> String {
        match self {
            Member::Number(number) => number.to_string(),
            Member::Text(text) => format!("\"{}\"", printable(text.as_bytes(), SHOWN_MAX)),
            Member::Null => "null".into(),
            Member::List => "[...]".into(),
            Member::Other(text) => text.clone(),
        }
    }
}

/// An object: the members with known names, and the names of the others.
#[derive(Debug, Default)]
pub(super) struct Object {
    known: Vec<(&'static str, Member)>,
    others: Vec<String>,
}

impl Object {
    /// Adds a member with a known name.
    ///
    /// # Errors
    /// If there is one.
    pub(super) fn add(&mut self, name: &'static str, member: Member) -> Result<(), String> {
        self.check_new(name)?;
        self.known.push((name, member));
        Ok(())
    }

    /// Refuses a name that another member has.
    pub(super) fn check_new(&self, name: &str) -> Result<(), String> {
        if self.has(name) || self.others.iter().any(|other| other == name) {
            return Err(format!(
                "ambiguous: the same object has \"{}\" twice: is the list damaged?",
                printable(name.as_bytes(), SHOWN_MAX)
            ));
        }
        Ok(())
    }

    /// Adds the name of another member.
    ///
    /// # Errors
    /// If there are too many.
    pub(super) fn add_other(&mut self, name: String) -> Result<(), String> {
        if self.others.len() == OTHERS_MAX {
            return Err(format!("an object with more than {OTHERS_MAX} unknown members"));
        }
        self.others.push(name);
        Ok(())
    }

    pub(super) fn get(&self, name: &str) -> Option<&Member> {
        self.known.iter().find(|member| member.0 == name).map(|member| &member.1)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    pub(super) fn has_any(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.has(name))
    }

    /// The member with one of these names.
    ///
    /// # Errors
    /// If there are two.
    pub(super) fn one_of(&self, names: &[&str]) -> Result<Option<&Member>, String> {
        let mut found = names.iter().filter_map(|name| Some((name, self.get(name)?)));
        let first = found.next();
        match (first, found.next()) {
            (Some((one, _)), Some((other, _))) => Err(format!(
                "ambiguous: the same object has \"{one}\" and \"{other}\": keep the one that is about the disk"
            )),
            _ => Ok(first.map(|(_, member)| member)),
        }
    }

    /// Checks that the list with one of these names was read. It may be absent or null, which is an empty list, if
    /// all other members are `known`: others may stand for it. Names that begin with `_` describe the object.
    pub(super) fn check_list(&self, names: &[&str], known: &[&[&str]]) -> Result<(), String> {
        match self.one_of(names)? {
            Some(Member::List) => Ok(()),
            None | Some(Member::Null) => self.check_others(names[0], &[known, &[names]].concat()),
            Some(other) => Err(format!("not a list of ranges: {}", other.shown())),
        }
    }

    /// Refuses members that are not known, where `absent` may be omitted.
    pub(super) fn check_others(&self, absent: &str, known: &[&[&str]]) -> Result<(), String> {
        let is_known =
            |name: &str| name.starts_with('_') || known.iter().any(|of| of.contains(&name));
        let names = self.known.iter().map(|member| member.0);
        let mut names = names.chain(self.others.iter().map(String::as_str));
        match names.find(|name| !is_known(name)) {
            Some(other) => Err(format!(
                "no {absent}, but the unknown member \"{}\": is the answer an error, or the list renamed?",
                printable(other.as_bytes(), SHOWN_MAX)
            )),
            None => Ok(()),
        }
    }

    /// The object in a message.
    pub(super) fn shown(&self) -> String {
        let known =
            self.known.iter().map(|(name, member)| format!("\"{name}\":{}", member.shown()));
        let others = self.others.iter().map(|name| format!("\"{name}\":..."));
        let text: String = known.chain(others).take(9).collect::<Vec<_>>().join(",");
        shortened(&format!("{{{text}}}"))
    }
}

/// The beginning of a text without control characters.
pub(super) fn shortened(text: &str) -> String {
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    match text.char_indices().nth(SHOWN_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
