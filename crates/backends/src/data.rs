//! `data:TEXT`: bytes given literally, in the format of nbdkit's data plugin, or the core of it:
//!
//! - `0x55`, `85`, `0125`: one byte, in hexadecimal, decimal or octal
//! - `"text"`: its bytes, with the escapes of C (`\n`, `\x1b`, `\"` …)
//! - `@4k`, `@+4k`, `@-4k`, `@^512`: continue at this offset, so much further or back, or at the next
//!   multiple
//! - `( … )`: a group with offsets of its own; `X*N`: the byte, text or group N times
//! - `# …`: a comment, to the end of the line
//!
//! A group replaces all that it spans. The device is as large as the data reaches unless `size=` says otherwise; it can be written, in memory.

use std::sync::Arc;

use block::{
    Backend, Device, Error, Kind, Opened, Opening, Param, ParamKind, Result, Target, parse_size,
};

use crate::memory::MemoryDevice;
use crate::operand;

/// Most bytes that a description may unfold to, zeroes not counted; an item counts as [`ITEM_COST`]
/// bytes more. A second's work at most.
const WORK_MAX: u64 = 256 << 20;
/// What placing one item costs, measured in bytes that could be copied instead.
const ITEM_COST: u64 = 32;
/// Bytes of one item, repeated, that are written at a time.
const CHUNK: usize = 64 << 10;
/// Deepest nesting of groups: far below what the stack holds.
const DEPTH_MAX: usize = 100;
/// Largest device.
const SIZE_MAX: u64 = i64::MAX as u64;

/// The backend `data:TEXT`.
pub struct Data;

impl Backend for Data {
    fn schemes(&self) -> &'static [&'static str] {
        &["data"]
    }

    fn operand(&self) -> &'static str {
        "BYTES"
    }

    fn summary(&self) -> &'static str {
        "bytes given literally, for example data:'\"boot\" @510 0x55 0xaa'; kept in memory"
    }

    fn params(&self) -> &'static [Param] {
        &[Param {
            name: "size",
            kind: ParamKind::Size,
            default: None,
            doc: "Size of the device; without it, as large as the data.",
        }]
    }

    fn open(&self, target: Target) -> Opening<Opened> {
        let device = make(&target).map(|device| Opened::from(Arc::new(device) as Arc<dyn Device>));
        Box::pin(std::future::ready(device))
    }
}

fn make(target: &Target) -> Result<MemoryDevice> {
    let all = Parser { text: target.text()?.as_bytes(), at: 0, depth: 0 }.all()?;
    let size = target.args.size("size").unwrap_or(all.len);
    unfold(&all, operand::name(target), size)
}

/// A device of `size` bytes that holds the item.
fn unfold(all: &Item, name: String, size: u64) -> Result<MemoryDevice> {
    if all.work > WORK_MAX {
        let text = format!(
            "data: unfolds to more than {} MiB: use a file, or pattern: or sample:",
            WORK_MAX >> 20
        );
        return Err(Error::new(Kind::Usage, text));
    }
    let device = MemoryDevice::new(name, size).with_facts(|facts| facts.zeroed = false);
    Writer { device: &device, size }.item(all, 0)?;
    Ok(device)
}

/// One thing that a description says.
#[derive(Debug)]
struct Item {
    what: What,
    /// Bytes that it spans, at most [`SIZE_MAX`].
    len: u64,
    /// It holds nothing but zeroes.
    zero: bool,
    /// What unfolding it costs, see [`WORK_MAX`].
    work: u64,
}

#[derive(Debug)]
enum What {
    Bytes(Vec<u8>),
    /// Items with their offsets in the group.
    Group(Vec<(u64, Item)>),
    Repeat(Box<Item>, u64),
}

impl Item {
    fn new(what: What, len: u64, zero: bool, work: u64) -> Item {
        let work = if zero { ITEM_COST } else { work.saturating_add(ITEM_COST) };
        Item { what, len, zero, work }
    }

    fn bytes(bytes: Vec<u8>) -> Item {
        let zero = bytes.iter().all(|&byte| byte == 0);
        let len = bytes.len() as u64;
        Item::new(What::Bytes(bytes), len, zero, len)
    }

    fn repeat(item: Item, count: u64) -> Result<Item> {
        let len = item.len.checked_mul(count).filter(|&len| len <= SIZE_MAX);
        let len = len.ok_or_else(too_large)?;
        let work = match item.what {
            What::Bytes(_) => len,
            _ => item.work.saturating_mul(count),
        };
        let zero = item.zero || count == 0;
        Ok(Item::new(What::Repeat(Box::new(item), count), len, zero, work))
    }
}

fn too_large() -> Error {
    Error::new(Kind::Usage, "data: reaches beyond 2^63 - 1 bytes")
}

/// The items of a group as they are read.
#[derive(Default)]
struct Group {
    items: Vec<(u64, Item)>,
    at: u64,
    end: u64,
}

impl Group {
    fn seek(&mut self, to: Option<u64>) -> Result<()> {
        self.at = to.filter(|&to| to <= SIZE_MAX).ok_or_else(too_large)?;
        self.end = self.end.max(self.at);
        Ok(())
    }

    fn push(&mut self, item: Item) -> Result<()> {
        let at = self.at;
        self.seek(at.checked_add(item.len))?;
        if let What::Bytes(more) = &item.what
            && let Some((before, Item { what: What::Bytes(bytes), len, zero, work })) =
                self.items.last_mut()
            && *before + *len == at
        {
            bytes.extend_from_slice(more);
            *len += item.len;
            *zero &= item.zero;
            *work += item.work;
            return Ok(());
        }
        self.items.push((at, item));
        Ok(())
    }

    fn finish(self) -> Item {
        let zero = self.items.iter().all(|(_, item)| item.zero);
        let work = self.items.iter().fold(0_u64, |sum, (_, item)| sum.saturating_add(item.work));
        Item::new(What::Group(self.items), self.end, zero, work)
    }
}

/// Unfolds items into a device that reads as zeroes.
struct Writer<'a> {
    device: &'a MemoryDevice,
    size: u64,
}

impl Writer<'_> {
    fn item(&self, item: &Item, at: u64) -> Result<()> {
        let inside = self.size.saturating_sub(at);
        match &item.what {
            _ if item.zero => self.device.zero_now(at, item.len.min(inside)),
            What::Bytes(bytes) => self.bytes(bytes, at),
            What::Group(items) => {
                // A group replaces all that it spans, gaps included.
                self.device.zero_now(at, item.len.min(inside))?;
                items.iter().try_for_each(|(offset, item)| self.item(item, at + offset))
            }
            What::Repeat(item, count) => match &item.what {
                What::Bytes(bytes) => self.repeated(bytes, *count, at),
                _ => (0..*count).try_for_each(|index| self.item(item, at + index * item.len)),
            },
        }
    }

    /// Writes what lies inside the device.
    fn bytes(&self, bytes: &[u8], at: u64) -> Result<()> {
        let inside = usize::try_from(self.size.saturating_sub(at)).unwrap_or(usize::MAX);
        self.device.write_now(at, &bytes[..bytes.len().min(inside)])
    }

    fn repeated(&self, bytes: &[u8], count: u64, at: u64) -> Result<()> {
        // A few repetitions make a chunk, and the chunk is repeated.
        let most = (CHUNK / bytes.len().max(1)).max(1) as u64;
        let chunk = bytes.repeat(most.min(count) as usize);
        let (mut left, mut at) = (count, at);
        while left > 0 {
            let now = left.min(most);
            let len = bytes.len() * now as usize;
            self.bytes(&chunk[..len], at)?;
            at += len as u64;
            left -= now;
        }
        Ok(())
    }
}

struct Parser<'a> {
    text: &'a [u8],
    at: usize,
    depth: usize,
}

impl Parser<'_> {
    fn all(mut self) -> Result<Item> {
        let group = self.group()?;
        match self.peek() {
            None => Ok(group.finish()),
            Some(_) => Err(self.wrong("a ) without its (")),
        }
    }

    /// Items up to the end or a closing parenthesis.
    fn group(&mut self) -> Result<Group> {
        let mut group = Group::default();
        loop {
            self.skip_space();
            let item = match self.peek() {
                None | Some(b')') => return Ok(group),
                Some(b'@') => {
                    self.at += 1;
                    let to = self.seek(group.at)?;
                    group.seek(to)?;
                    continue;
                }
                Some(b'"') => self.string()?,
                Some(b'(') => self.nested()?,
                Some(byte) if byte.is_ascii_digit() => Item::bytes(vec![self.byte()?]),
                Some(_) => {
                    return Err(self.wrong(
                        "not understood; known are bytes (0x55, 85, 0125), \"text\", @OFFSET, \
                         ( ... ), *N and # comments",
                    ));
                }
            };
            let item = self.repeated(item)?;
            group.push(item)?;
        }
    }

    fn nested(&mut self) -> Result<Item> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(self.wrong("groups are nested too deeply"));
        }
        self.at += 1;
        let group = self.group()?;
        if self.peek() != Some(b')') {
            return Err(self.wrong("a ( without its )"));
        }
        self.at += 1;
        self.depth -= 1;
        Ok(group.finish())
    }

    /// The item with the repetitions behind it: `X*2*3` is six times X.
    fn repeated(&mut self, item: Item) -> Result<Item> {
        let mut count = None;
        loop {
            self.skip_space();
            if self.peek() != Some(b'*') {
                break;
            }
            self.at += 1;
            self.skip_space();
            let times = self.size()?;
            count = Some(times.checked_mul(count.unwrap_or(1)).ok_or_else(too_large)?);
        }
        match count {
            None => Ok(item),
            Some(count) => Item::repeat(item, count),
        }
    }

    /// Where `@…` leads from offset `at`; `None` where it cannot be represented.
    fn seek(&mut self, at: u64) -> Result<Option<u64>> {
        let sign = self.peek().filter(|sign| b"+-^".contains(sign));
        self.at += usize::from(sign.is_some());
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
        // As nbdkit: C's prefixes, and else a size.
        let number = match word.as_bytes() {
            [b'0', b'x' | b'X', ..] => u64::from_str_radix(&word[2..], 16).ok(),
            [b'0', _, ..] => u64::from_str_radix(&word[1..], 8).ok(),
            _ => None,
        };
        match number {
            Some(number) => Ok(number),
            None => parse_size(&word).map_err(|error| self.wrong(&error.text())),
        }
    }

    fn byte(&mut self) -> Result<u8> {
        let word = self.word();
        let parsed = match word.as_bytes() {
            [b'0', b'x' | b'X', ..] => u8::from_str_radix(&word[2..], 16),
            [b'0', _, ..] => u8::from_str_radix(&word[1..], 8),
            _ => word.parse(),
        };
        parsed.map_err(|_| self.wrong(&format!("{word:?} is not a byte, 0 to 255")))
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
                    return Err(self.wrong("a \" without its end"));
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
            Some(byte @ (b'\\' | b'"' | b'\'' | b'?')) => Ok(byte),
            Some(b'x') => {
                let digits = self.digits(2, |byte| byte.is_ascii_hexdigit());
                u8::from_str_radix(&digits, 16).map_err(|_| self.wrong("\\x needs a number"))
            }
            Some(b'0'..=b'7') => {
                self.at -= 1;
                let digits = self.digits(3, |byte| (b'0'..=b'7').contains(&byte));
                u8::from_str_radix(&digits, 8).map_err(|_| self.wrong("is more than 255"))
            }
            _ => Err(self.wrong("unknown escape; known are those of C, \\n, \\x1b, \\033")),
        }
    }

    /// Up to `most` bytes of a kind.
    fn digits(&mut self, most: usize, kind: impl Fn(u8) -> bool) -> String {
        let mut digits = String::new();
        while let Some(byte) = self.peek().filter(|&byte| digits.len() < most && kind(byte)) {
            digits.push(char::from(byte));
            self.at += 1;
        }
        digits
    }

    /// Letters and digits from here on.
    fn word(&mut self) -> String {
        self.digits(usize::MAX, |byte| byte.is_ascii_alphanumeric())
    }

    fn skip_space(&mut self) {
        while let Some(byte) = self.peek() {
            match byte {
                b'#' => while self.take().is_some_and(|byte| byte != b'\n') {},
                byte if byte.is_ascii_whitespace() => self.at += 1,
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
        let place = match shown.is_empty() {
            true => "at the end".to_string(),
            false => format!("at character {}, before {shown:?}", self.at + 1),
        };
        Error::new(Kind::Usage, format!("data: {place}: {what}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a description unfolds to.
    fn bytes(text: &str) -> Result<Vec<u8>> {
        let all = Parser { text: text.as_bytes(), at: 0, depth: 0 }.all()?;
        let device = unfold(&all, "data".into(), all.len)?;
        let mut bytes = vec![0xee; usize::try_from(all.len).unwrap()];
        device.read_now(0, &mut bytes);
        Ok(bytes)
    }

    #[test]
    fn descriptions_unfold_to_their_bytes() {
        let cases: [(&str, &[u8]); 18] = [
            ("", b""),
            ("1 0x2 03 255", &[1, 2, 3, 255]),
            ("\"a\\n\\x41\\101\\\"\" 0", b"a\nAA\"\0"),
            ("@3 1", &[0, 0, 0, 1]),
            ("@0x3 1", &[0, 0, 0, 1]),
            ("@03 1*0x2", &[0, 0, 0, 1, 1]),
            ("1 @+2 2 @-1 3", &[1, 0, 0, 3]),
            ("1 @^4 2 @^4 @^4", &[1, 0, 0, 0, 2, 0, 0, 0]),
            ("7*3", &[7, 7, 7]),
            ("1 2*2 3", &[1, 2, 2, 3]),
            ("\"ab\"*2", b"abab"),
            ("(1 2)*2 3", &[1, 2, 1, 2, 3]),
            ("(@2 1)*2", &[0, 0, 1, 0, 0, 1]),
            ("((1)*2 (0)*2)*2 * 1", &[1, 1, 0, 0, 1, 1, 0, 0]),
            ("5*4 @1 0*2", &[5, 0, 0, 5]),
            ("5*4 @0 (@1 6)", &[0, 6, 5, 5]),
            ("1 # one\n2#two", &[1, 2]),
            ("1*0 2", &[2]),
        ];
        for (text, expected) in cases {
            assert_eq!(bytes(text).unwrap(), expected, "{text}");
        }
        assert_eq!(bytes("0*1M 1").unwrap().len(), (1 << 20) + 1);
        let odd = bytes("\"abc\"*100k").unwrap();
        assert_eq!(odd.len(), 300 << 10);
        assert!(odd.chunks(3).all(|chunk| chunk == b"abc"));
    }

    #[test]
    fn mistakes_are_told_with_their_place() {
        let cases = [
            ("256", "not a byte"),
            ("0xzz", "not a byte"),
            ("08", "not a byte"),
            ("x", "not understood"),
            ("(1", "without its )"),
            ("1)", "without its ("),
            ("\"abc", "without its end"),
            ("\"\\q\"", "unknown escape"),
            ("\"\\777\"", "more than 255"),
            ("\"\\x\"", "needs a number"),
            ("@", "not a size"),
            ("1 @-2", "before the start"),
            ("@^0", "aligned to 0"),
            ("*3", "not understood"),
            ("1*7e 1*7e", "2^63 - 1"),
            ("(1*1M)*1G", "256 MiB"),
            ("((1 @100)*1M)*1M", "256 MiB"),
        ];
        for (text, part) in cases {
            let error = unfold_error(text);
            assert!(error.contains(part), "{text}: {error}");
        }
        assert!(unfold_error(&"(".repeat(1000)).contains("too deeply"));
        assert!(unfold_error(&format!("1{}", "*2".repeat(1000))).contains("2^63 - 1"));
        assert!(unfold_error("1 2 x").contains("at character 5, before \"x\""));
    }

    fn unfold_error(text: &str) -> String {
        let all = Parser { text: text.as_bytes(), at: 0, depth: 0 }.all();
        let device = all.and_then(|all| unfold(&all, "data".into(), all.len));
        device.err().unwrap().to_string()
    }

    #[test]
    fn a_device_may_be_smaller_or_larger_than_its_data() {
        let all = Parser { text: b"1*10", at: 0, depth: 0 }.all().unwrap();
        let mut read = [9; 4];
        unfold(&all, "data".into(), 4).unwrap().read_now(0, &mut read);
        assert_eq!(read, [1; 4]);
        unfold(&all, "data".into(), 100).unwrap().read_now(8, &mut read);
        assert_eq!(read, [1, 1, 0, 0]);
    }
}
