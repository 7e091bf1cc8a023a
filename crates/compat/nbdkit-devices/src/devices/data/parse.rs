//! Parses a description. Names are resolved where they are used, so that the resulting tree has
//! none.

use std::sync::Arc;

use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{parse_number, parse_size};

use super::item::{Group, Item, WORK_MAX};
use super::source::Source;

/// Maximum nesting of groups and variables: far below what the stack can hold.
const DEPTH_MAX: usize = 100;
/// Maximum number of characters parsed, with variables counted at each use.
const TEXT_MAX: usize = 16 << 20;

/// Parses a description; variables are looked up in `variables`, then in the environment.
pub fn parse(text: &str, variables: &[(String, String)]) -> Result<Arc<Item>> {
    let mut context =
        Context { variables, names: Vec::new(), depth: 0, text: TEXT_MAX, read: WORK_MAX };
    let whole = Parser::new(text, None, &mut context)?.all()?;
    context.item(whole)
}

/// State shared by all texts of a description.
struct Context<'a> {
    variables: &'a [(String, String)],
    /// Assigned names; the last one is found first.
    names: Vec<(String, Parsed)>,
    depth: usize,
    /// Number of characters that may still be parsed.
    text: usize,
    /// Number of bytes of files and scripts that may still be read.
    read: u64,
}

impl Context<'_> {
    /// The item; reads a source now.
    fn item(&mut self, parsed: Parsed) -> Result<Arc<Item>> {
        match parsed {
            Parsed::Item(item) => Ok(item),
            Parsed::Source(source) => {
                let bytes = source.all()?;
                self.read(bytes)
            }
        }
    }

    fn read(&mut self, bytes: Vec<u8>) -> Result<Arc<Item>> {
        self.read = self.read.checked_sub(bytes.len() as u64).ok_or_else(|| {
            let text = format!("data: files and scripts have more than {} MiB", WORK_MAX >> 20);
            Error::new(Kind::Usage, text)
        })?;
        Ok(Arc::new(Item::bytes(bytes)))
    }
}

/// An item, or the source of its bytes: a sliced source is not read completely.
#[derive(Clone)]
enum Parsed {
    Item(Arc<Item>),
    Source(Source),
}

struct Parser<'a, 'c, 'v> {
    text: &'a [u8],
    at: usize,
    /// The variable that contains this text.
    variable: Option<&'a str>,
    context: &'c mut Context<'v>,
}

impl<'a, 'c, 'v> Parser<'a, 'c, 'v> {
    fn new(
        text: &'a str,
        variable: Option<&'a str>,
        context: &'c mut Context<'v>,
    ) -> Result<Parser<'a, 'c, 'v>> {
        context.text = context.text.checked_sub(text.len() + 1).ok_or_else(|| {
            let text = format!("data: more than {TEXT_MAX} characters, with its variables");
            Error::new(Kind::Usage, text)
        })?;
        Ok(Parser { text: text.as_bytes(), at: 0, variable, context })
    }

    fn all(mut self) -> Result<Parsed> {
        let all = self.group()?;
        match self.peek() {
            None => Ok(all),
            Some(_) => Err(self.wrong("a ) without a (")),
        }
    }

    /// Items up to the end or a closing parenthesis. Names assigned here go out of scope here.
    fn group(&mut self) -> Result<Parsed> {
        self.context.depth += 1;
        if self.context.depth > DEPTH_MAX {
            return Err(self.wrong("groups or variables are nested too deeply"));
        }
        let names = self.context.names.len();
        let all = self.items()?;
        self.context.names.truncate(names);
        self.context.depth -= 1;
        Ok(all)
    }

    fn items(&mut self) -> Result<Parsed> {
        let mut group = Group::default();
        // A single source remains a source.
        let mut alone = None;
        let mut empty = true;
        loop {
            self.skip_space();
            let Some(byte) = self.peek().filter(|&byte| byte != b')') else {
                if let Some(source) = alone {
                    return Ok(Parsed::Source(source));
                }
                return Ok(Parsed::Item(group.finish()));
            };
            if let Some(source) = alone.take() {
                group.push(self.context.item(Parsed::Source(source))?)?;
            }
            if byte == b'@' {
                self.at += 1;
                let to = self.seek(group.at())?;
                group.seek(to)?;
                empty = false;
                continue;
            }
            let first = self.first(byte)?;
            match self.behind(first)? {
                None => {}
                Some(Parsed::Source(source)) if empty => {
                    (alone, empty) = (Some(source), false);
                }
                Some(parsed) => {
                    group.push(self.context.item(parsed)?)?;
                    empty = false;
                }
            }
        }
    }

    /// Parses what begins with this byte, without the operators after it.
    fn first(&mut self, byte: u8) -> Result<Parsed> {
        let item = match byte {
            b'"' => self.string()?,
            b'(' => return self.nested(),
            b'<' => return self.source(),
            b'\\' => return self.named(),
            b'$' => return self.variable(),
            b'l' | b'b' => self.number_of_bytes()?,
            b'0'..=b'9' => Item::bytes(vec![self.byte()?]),
            b'*' | b'[' => {
                return Err(self.wrong("*N and [N:M] must follow the item that they apply to"));
            }
            b'-' => return Err(self.wrong("-> must follow the item to name")),
            _ => {
                return Err(self.wrong(
                    "not understood; known are bytes (0x55, 85, 0125), le16: to be64:, \"text\", \
                     <FILE, <(SCRIPT), $VARIABLE, \\name, @OFFSET, ( ... ), *N, [N:M], -> \\name \
                     and # comments",
                ));
            }
        };
        Ok(Parsed::Item(Arc::new(item)))
    }

    /// Applies the operators after an item; `None` if it was assigned to a name.
    fn behind(&mut self, mut parsed: Parsed) -> Result<Option<Parsed>> {
        loop {
            self.skip_space();
            match self.peek() {
                Some(b'*') => {
                    self.at += 1;
                    self.skip_space();
                    let count = self.size()?;
                    let item = self.context.item(parsed)?;
                    parsed = Parsed::Item(Arc::new(Item::repeat(&item, count)?));
                }
                Some(b'[') => parsed = self.slice(parsed)?,
                Some(b'-') => {
                    self.at += 1;
                    if self.take() != Some(b'>') {
                        return Err(self.wrong("- is not followed by >"));
                    }
                    self.skip_space();
                    let name = self.name()?;
                    self.context.names.push((name, parsed));
                    return Ok(None);
                }
                _ => return Ok(Some(parsed)),
            }
        }
    }

    /// `[N:M]`, with N and M optional.
    fn slice(&mut self, parsed: Parsed) -> Result<Parsed> {
        let place = self.at;
        self.at += 1;
        let start = self.optional_size()?.unwrap_or(0);
        if self.take() != Some(b':') {
            return Err(self.wrong("a slice is [N:M], [N:] or [:M]"));
        }
        let end = self.optional_size()?;
        if self.take() != Some(b']') {
            return Err(self.wrong("a slice ends with ]"));
        }
        let backwards = end.is_some_and(|end| end < start);
        let sliced = match parsed {
            _ if backwards => None,
            // As nbdkit, which drops empty items.
            _ if end == Some(start) => Some(Arc::new(Item::bytes(Vec::new()))),
            Parsed::Source(source) => {
                let bytes = source.part(start, end)?;
                Some(self.context.read(bytes)?)
            }
            Parsed::Item(item) => {
                Item::slice(&item, start..end.unwrap_or(item.len().max(start))).map(Arc::new)
            }
        };
        match sliced {
            Some(sliced) => Ok(Parsed::Item(sliced)),
            None => {
                self.at = place;
                Err(self.wrong("the slice exceeds the item"))
            }
        }
    }

    fn nested(&mut self) -> Result<Parsed> {
        self.at += 1;
        let group = self.group()?;
        match self.take() {
            Some(b')') => Ok(group),
            _ => Err(self.wrong("a ( without a )")),
        }
    }

    /// `<FILE` or `<(SCRIPT)`
    fn source(&mut self) -> Result<Parsed> {
        let start = self.at;
        self.at += 1;
        if self.peek() != Some(b'(') {
            let name = self.bytes_while(|byte| !b"*[) \t\n".contains(&byte));
            if name.is_empty() {
                return Err(self.wrong("< is followed by the name of a file, or by (SCRIPT)"));
            }
            return Ok(Parsed::Source(Source::File(name)));
        }
        self.at += 1;
        let mut open = 0;
        let script = self.bytes_while(|byte| {
            match byte {
                b'(' => open += 1,
                b')' if open == 0 => return false,
                b')' => open -= 1,
                _ => {}
            }
            true
        });
        if self.take().is_none() {
            self.at = start;
            return Err(self.wrong("a <( without a )"));
        }
        Ok(Parsed::Source(Source::Script(script)))
    }

    /// `\name`: the assigned item.
    fn named(&mut self) -> Result<Parsed> {
        let place = self.at;
        let name = self.name()?;
        let mut known = self.context.names.iter().rev();
        match known.find(|(known, _)| *known == name) {
            Some((_, parsed)) => Ok(parsed.clone()),
            None => {
                self.at = place;
                Err(self.wrong(&format!("nothing has the name \\{name}")))
            }
        }
    }

    fn name(&mut self) -> Result<String> {
        if self.take() != Some(b'\\') {
            return Err(self.wrong("a name begins with \\"));
        }
        let name = self.bytes_while(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte));
        if name.is_empty() {
            Err(self.wrong("\\ is followed by letters, digits, _ and -"))
        } else {
            Ok(name)
        }
    }

    /// `$VARIABLE`: a group with its text.
    fn variable(&mut self) -> Result<Parsed> {
        let place = self.at;
        self.at += 1;
        let name = self.bytes_while(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if name.is_empty() || name.as_bytes()[0].is_ascii_digit() {
            self.at = place;
            return Err(self.wrong("$ is followed by the name of a variable"));
        }
        let given = self.context.variables.iter().find(|(key, _)| *key == name);
        let text = match given {
            Some((_, text)) => Some(text.clone()),
            None => std::env::var(&name).ok(),
        };
        let Some(text) = text else {
            self.at = place;
            return Err(self.wrong(&format!(
                "no variable {name}: set it after the data, {name}=VALUE, or in the environment"
            )));
        };
        let parser = Parser::new(&text, Some(&name), self.context)?;
        parser.all()
    }

    /// `le16:N` and similar.
    fn number_of_bytes(&mut self) -> Result<Item> {
        let place = self.at;
        let kind = self.word();
        let (len, big) = match kind.as_str() {
            "le16" => (2, false),
            "be16" => (2, true),
            "le32" => (4, false),
            "be32" => (4, true),
            "le64" => (8, false),
            "be64" => (8, true),
            _ => {
                self.at = place;
                return Err(self.wrong("not understood; numbers are le16:N to be64:N"));
            }
        };
        if self.take() != Some(b':') {
            return Err(self.wrong(&format!("{kind} is followed by : and a number")));
        }
        let word = self.word();
        let bits = len * 8;
        let fits = |number: &u64| bits == 64 || number >> bits == 0;
        let number = parse_number(&word).ok().filter(fits);
        let Some(number) = number else {
            return Err(self.wrong(&format!("{word:?} is not a number of {bits} bits")));
        };
        let bytes = if big {
            number.to_be_bytes()[8 - len..].to_vec()
        } else {
            number.to_le_bytes()[..len].to_vec()
        };
        Ok(Item::bytes(bytes))
    }

    /// The target of `@…` from offset `at`; `None` if it cannot be represented.
    fn seek(&mut self, at: u64) -> Result<Option<u64>> {
        let sign = self.peek().filter(|sign| b"+-^".contains(sign));
        self.at += usize::from(sign.is_some());
        self.skip_space();
        let by = self.size()?;
        match sign {
            None => Ok(Some(by)),
            Some(b'+') => Ok(at.checked_add(by)),
            Some(b'-') => match at.checked_sub(by) {
                Some(to) => Ok(Some(to)),
                None => Err(self.wrong("leads to before the start")),
            },
            Some(_) if by == 0 => Err(self.wrong("nothing is aligned to 0")),
            Some(_) => Ok(at.checked_next_multiple_of(by)),
        }
    }

    fn optional_size(&mut self) -> Result<Option<u64>> {
        self.skip_space();
        match self.peek() {
            Some(b':' | b']') => Ok(None),
            _ => self.size().map(Some),
        }
    }

    fn size(&mut self) -> Result<u64> {
        let word = self.word();
        // As nbdkit: C's prefixes. In addition, sizes.
        if matches!(word.as_bytes(), [b'0', b'0'..=b'9' | b'x' | b'X', ..]) {
            let number = parse_number(&word).ok();
            return number.ok_or_else(|| self.wrong(&format!("{word:?} is not a number")));
        }
        parse_size(&word).map_err(|error| self.wrong(&error.text()))
    }

    fn byte(&mut self) -> Result<u8> {
        let word = self.word();
        parse_number(&word).map_err(|_| self.wrong(&format!("{word:?} is not a byte, 0 to 255")))
    }

    fn string(&mut self) -> Result<Item> {
        let start = self.at;
        self.at += 1;
        let mut bytes = Vec::new();
        loop {
            match self.take() {
                Some(b'"') => return Ok(Item::bytes(bytes)),
                Some(b'\\') => bytes.push(self.escape()?),
                Some(byte) => bytes.push(byte),
                None => {
                    self.at = start;
                    return Err(self.wrong("a \" without an end"));
                }
            }
        }
    }

    fn escape(&mut self) -> Result<u8> {
        match self.take() {
            Some(b'a') => Ok(7),
            Some(b'b') => Ok(8),
            Some(b't') => Ok(b'\t'),
            Some(b'n') => Ok(b'\n'),
            Some(b'v') => Ok(11),
            Some(b'f') => Ok(12),
            Some(b'r') => Ok(b'\r'),
            Some(b'x') => {
                let digits = self.digits(2, |byte| byte.is_ascii_hexdigit());
                let byte = u8::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 2);
                byte.ok_or_else(|| self.wrong("\\x is followed by two hexadecimal digits"))
            }
            Some(b'0'..=b'7') => {
                self.at -= 1;
                let digits = self.digits(3, |byte| (b'0'..=b'7').contains(&byte));
                u8::from_str_radix(&digits, 8).map_err(|_| self.wrong("is more than 255"))
            }
            Some(b'8' | b'9' | b'u') | None => {
                Err(self.wrong("unknown escape; known are those of C, \\n, \\x1b, \\033"))
            }
            // As nbdkit: any other character is literal.
            Some(byte) => Ok(byte),
        }
    }

    /// Up to `most` digits of a kind.
    fn digits(&mut self, most: usize, kind: impl Fn(u8) -> bool) -> String {
        let mut digits = String::new();
        while let Some(byte) = self.peek().filter(|&byte| digits.len() < most && kind(byte)) {
            digits.push(char::from(byte));
            self.at += 1;
        }
        digits
    }

    /// The letters and digits that follow.
    fn word(&mut self) -> String {
        self.digits(usize::MAX, |byte| byte.is_ascii_alphanumeric())
    }

    /// The bytes of a kind that follow; they end at a character boundary.
    fn bytes_while(&mut self, mut kind: impl FnMut(u8) -> bool) -> String {
        let start = self.at;
        while self.peek().is_some_and(&mut kind) {
            self.at += 1;
        }
        String::from_utf8_lossy(&self.text[start..self.at]).into_owned()
    }

    fn skip_space(&mut self) {
        while let Some(byte) = self.peek() {
            match byte {
                b'#' => while self.take().is_some_and(|byte| byte != b'\n') {},
                b' ' | b'\t'..=b'\r' => self.at += 1,
                _ => return,
            }
        }
    }

    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn take(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Some(byte)
    }

    fn wrong(&self, what: &str) -> Error {
        let rest = String::from_utf8_lossy(&self.text[self.at.min(self.text.len())..]);
        let shown: String = rest.chars().take(20).collect();
        let place = if shown.is_empty() {
            "at the end".to_string()
        } else {
            format!("at character {}, before {shown:?}", self.at + 1)
        };
        let variable = self.variable.map(|name| format!(" of ${name}")).unwrap_or_default();
        Error::new(Kind::Usage, format!("data: {place}{variable}: {what}"))
    }
}
