//! Parses a description.

use std::fs::File;
use std::io::Read as _;

use blockhaul_backends::support::decode_base64;
use blockhaul_block::{Error, Kind, Result};
use blockhaul_catalog::{parse_number, parse_size};

use super::image::{DataImage, WORK_MAX, too_large};

/// Where the forms are that only nbdkit's plugin has.
pub const PLUGIN: &str =
    "use nbdkit's plugin (Debian's package nbdkit): write 'nbdkit:data?data=…'";

/// Parses a description, and reads its files.
///
/// # Errors
/// [`Kind::Usage`] for what is not understood, with its place; and errors of files.
pub fn parse(text: &str) -> Result<DataImage> {
    let mut parser = Parser { text: text.as_bytes(), at: 0, read: WORK_MAX };
    let mut image = DataImage::default();
    while let Some(byte) = parser.next_item() {
        if byte == b'@' {
            parser.at += 1;
            let to = parser.seek(image.at())?;
            image.seek(to)?;
        } else {
            let bytes = parser.bytes(byte)?;
            let count = parser.repetitions()?;
            image.push(bytes, count)?;
        }
    }
    Ok(image)
}

struct Parser<'a> {
    text: &'a [u8],
    at: usize,
    /// Number of bytes of files that may still be read.
    read: u64,
}

impl Parser<'_> {
    /// The first byte of the next item.
    fn next_item(&mut self) -> Option<u8> {
        self.skip_space();
        self.peek()
    }

    /// Parses what begins with this byte.
    fn bytes(&mut self, byte: u8) -> Result<Vec<u8>> {
        match byte {
            b'"' => self.string(),
            b'<' => self.file(),
            b'0'..=b'9' => Ok(vec![self.byte()?]),
            b'*' => Err(self.wrong("*N must follow the bytes that it applies to")),
            b'(' | b')' => Err(self.of_plugin("groups, ( … ),")),
            b'[' => Err(self.of_plugin("slices, [N:M],")),
            b'\\' | b'-' => Err(self.of_plugin("names, -> \\name,")),
            b'$' => Err(self.of_plugin("variables, $NAME,")),
            b'b' if self.text[self.at..].starts_with(b"base64:") => self.base64(),
            b'l' | b'b' => Err(self.of_plugin("numbers of several bytes, le16:N,")),
            _ => Err(self.wrong(
                "not understood; known are bytes (0x55, 85, 0125), \"text\", base64:TEXT, <FILE, @OFFSET, *N \
                 and # comments",
            )),
        }
    }

    /// The product of all `*N` after an item.
    fn repetitions(&mut self) -> Result<u64> {
        let mut count = 1_u64;
        while self.next_item() == Some(b'*') {
            self.at += 1;
            self.skip_space();
            count = count.checked_mul(self.size()?).ok_or_else(too_large)?;
        }
        Ok(count)
    }

    /// `base64:TEXT`
    fn base64(&mut self) -> Result<Vec<u8>> {
        let start = self.at + "base64:".len();
        self.at = start;
        while self.peek().is_some_and(|byte| byte.is_ascii_alphanumeric() || b"+/=".contains(&byte))
        {
            self.at += 1;
        }
        let text = String::from_utf8_lossy(&self.text[start..self.at]);
        decode_base64(&text).map_err(|error| self.wrong(&error.text()))
    }

    /// `<FILE`
    fn file(&mut self) -> Result<Vec<u8>> {
        let place = self.at;
        self.at += 1;
        if self.peek() == Some(b'(') {
            self.at = place;
            return Err(self.of_plugin("scripts, <( … ),"));
        }
        let start = self.at;
        while self.peek().is_some_and(|byte| !b"*[) \t\n".contains(&byte)) {
            self.at += 1;
        }
        let name = String::from_utf8_lossy(&self.text[start..self.at]).into_owned();
        if name.is_empty() {
            return Err(self.wrong("< is followed by the name of a file"));
        }
        let file = File::open(&name);
        let file =
            file.map_err(|error| Error::system(format!("data: cannot open {name}"), error))?;
        let mut bytes = Vec::new();
        let outcome = file.take(self.read + 1).read_to_end(&mut bytes);
        outcome.map_err(|error| Error::system(format!("data: cannot read {name}"), error))?;
        self.read = self.read.checked_sub(bytes.len() as u64).ok_or_else(|| {
            Error::new(Kind::Usage, format!("data: files have more than {} MiB", WORK_MAX >> 20))
        })?;
        Ok(bytes)
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

    fn string(&mut self) -> Result<Vec<u8>> {
        let start = self.at;
        self.at += 1;
        let mut bytes = Vec::new();
        loop {
            match self.take() {
                Some(b'"') => return Ok(bytes),
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

    /// A form that only nbdkit's plugin has.
    fn of_plugin(&self, form: &str) -> Error {
        self.wrong(&format!("{form} are not supported")).with_remedy(PLUGIN)
    }

    fn wrong(&self, what: &str) -> Error {
        let rest = String::from_utf8_lossy(&self.text[self.at.min(self.text.len())..]);
        let shown: String = rest.chars().take(20).collect();
        let place = if shown.is_empty() {
            "at the end".to_string()
        } else {
            format!("at character {}, before {shown:?}", self.at + 1)
        };
        Error::new(Kind::Usage, format!("data: {place}: {what}"))
    }
}
