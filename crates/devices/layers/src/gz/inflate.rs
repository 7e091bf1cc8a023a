//! Decodes a gzip file (RFC 1952), from its start or from a copy of the decoder.

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::TINFL_FLAG_HAS_MORE_INPUT;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};

/// Maximum distance of back-references.
const WINDOW: usize = 32 << 10;
/// Maximum header of a member: names and comments have no limit of their own.
const HEADER_MAX: usize = 1 << 20;
const TRAILER: usize = 8;

/// A decoder between two bytes. A copy of it continues from there: a few tens of KiB.
#[derive(Clone)]
pub struct Inflater {
    state: Box<DecompressorOxide>,
    window: Box<[u8; WINDOW]>,
    phase: Phase,
    /// Number of consumed bytes of the file.
    pub taken: u64,
    /// Number of decoded bytes.
    pub made: u64,
    /// Of the current member.
    sum: crc32fast::Hasher,
    len: u32,
    /// A member has ended: what follows need not be another one, it may be zeroes.
    complete: bool,
}

/// The decoder's position in a member.
#[derive(Clone)]
enum Phase {
    /// In its header, of which these bytes are known.
    Header(Vec<u8>),
    Body,
    /// In its checksum and length.
    Trailer(Vec<u8>),
    /// After the last member: zeroes.
    End,
}

impl Default for Inflater {
    fn default() -> Inflater {
        Inflater::new()
    }
}

impl Inflater {
    /// Memory use of a copy in bytes.
    pub(super) const COST: u64 =
        (size_of::<DecompressorOxide>() + WINDOW + size_of::<Inflater>()) as u64;

    /// At the start of a file.
    pub fn new() -> Inflater {
        Inflater {
            state: Box::default(),
            window: Box::new([0; WINDOW]),
            phase: Phase::Header(Vec::new()),
            taken: 0,
            made: 0,
            sum: crc32fast::Hasher::new(),
            len: 0,
            complete: false,
        }
    }

    /// Consumes bytes of the file, and appends decoded bytes to `out`, until there is no more input
    /// or `until` bytes were decoded, or somewhat more (a window's length).
    ///
    /// # Errors
    /// The file is damaged; the text says how.
    pub fn step(&mut self, input: &[u8], until: u64, out: &mut Vec<u8>) -> Result<(), String> {
        let mut input = input;
        while !input.is_empty() && self.made < until {
            let taken = match &mut self.phase {
                Phase::Header(known) => {
                    let before = known.len();
                    let more = input.len().min(HEADER_MAX + 1 - before);
                    known.extend_from_slice(&input[..more]);
                    if self.complete && !is_member(known) {
                        // Zeroes fill up a block of a tape; gzip warns of anything else.
                        let start = self.taken - before as u64;
                        zeroes(known, start)?;
                        self.phase = Phase::End;
                        self.taken += more as u64;
                        input = &input[more..];
                        continue;
                    }
                    match header_len(known)? {
                        Some(len) => {
                            self.begin_body();
                            len - before
                        }
                        None if before + more > HEADER_MAX => {
                            return Err("a header without an end".into());
                        }
                        None => more,
                    }
                }
                Phase::Body => self.body(input, out)?,
                Phase::Trailer(known) => {
                    let more = input.len().min(TRAILER - known.len());
                    known.extend_from_slice(&input[..more]);
                    if known.len() == TRAILER {
                        self.check()?;
                    }
                    more
                }
                Phase::End => {
                    zeroes(input, self.taken)?;
                    input.len()
                }
            };
            self.taken += taken as u64;
            input = &input[taken..];
        }
        Ok(())
    }

    /// Checks that the file may end here.
    ///
    /// # Errors
    /// It may not; the text says why.
    pub fn finish(&self) -> Result<(), String> {
        match &self.phase {
            Phase::End => Ok(()),
            Phase::Header(known) if self.complete && known.is_empty() => Ok(()),
            _ if self.taken == 0 => Err("it is empty".into()),
            _ => Err("its end is missing".into()),
        }
    }

    fn begin_body(&mut self) {
        self.state.init();
        self.sum = crc32fast::Hasher::new();
        self.len = 0;
        self.phase = Phase::Body;
    }

    fn body(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<usize, String> {
        let place = (self.made % WINDOW as u64) as usize;
        let window = &mut self.window[..];
        let flags = TINFL_FLAG_HAS_MORE_INPUT;
        let (status, taken, made) = decompress(&mut self.state, input, window, place, flags);
        let content = &self.window[place..place + made];
        out.extend_from_slice(content);
        self.sum.update(content);
        // The format counts in 32 bits.
        self.len = self.len.wrapping_add(made as u32);
        self.made += made as u64;
        match status {
            TINFLStatus::Done => self.phase = Phase::Trailer(Vec::new()),
            TINFLStatus::NeedsMoreInput | TINFLStatus::HasMoreOutput => {}
            _ => return Err(format!("it is damaged near offset {}", self.taken)),
        }
        Ok(taken)
    }

    /// Checks the complete trailer.
    fn check(&mut self) -> Result<(), String> {
        let Phase::Trailer(known) = &self.phase else { return Ok(()) };
        let number = |at: usize| u32::from_le_bytes(known[at..at + 4].try_into().expect("four"));
        if number(0) != self.sum.clone().finalize() || number(4) != self.len {
            return Err(format!("the checksum before offset {} is wrong", self.taken));
        }
        self.complete = true;
        self.phase = Phase::Header(Vec::new());
        Ok(())
    }
}

/// Checks what follows the last member, from this offset of the file. Else a damaged member would end the content.
fn zeroes(bytes: &[u8], at: u64) -> Result<(), String> {
    match bytes.iter().position(|&byte| byte != 0) {
        None => Ok(()),
        Some(place) => Err(format!(
            "there is neither a gzip member nor a zero at offset {}: the file is damaged, or continues with \
             something else",
            at + place as u64
        )),
    }
}

/// Whether these bytes may be the start of a member.
fn is_member(known: &[u8]) -> bool {
    let magic = [0x1f, 0x8b];
    let len = known.len().min(2);
    known[..len] == magic[..len]
}

/// The length of a member's header; `None`: not all of it is known.
fn header_len(known: &[u8]) -> Result<Option<usize>, String> {
    if !is_member(known) {
        return Err("not a gzip file".into());
    }
    let Some(fixed) = known.get(..10) else { return Ok(None) };
    let flags = fixed[3];
    if fixed[2] != 8 || flags & 0xe0 != 0 {
        return Err("unknown compression method".into());
    }
    let mut len = 10;
    if flags & 4 != 0 {
        let Some(extra) = known.get(len..len + 2) else { return Ok(None) };
        len += 2 + usize::from(u16::from_le_bytes([extra[0], extra[1]]));
    }
    // A name, and a comment.
    for flag in [8, 16] {
        if flags & flag != 0 {
            let rest = known.get(len..);
            let Some(end) = rest.and_then(|rest| rest.iter().position(|&byte| byte == 0)) else {
                return Ok(None);
            };
            len += end + 1;
        }
    }
    if flags & 2 != 0 {
        let Some(sum) = known.get(len..len + 2) else { return Ok(None) };
        let found = crc32fast::hash(&known[..len]) as u16;
        if u16::from_le_bytes([sum[0], sum[1]]) != found {
            return Err("the checksum of a header is wrong".into());
        }
        len += 2;
    }
    Ok((len <= known.len()).then_some(len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_measured_byte_by_byte() {
        let mut header = [
            &[0x1f, 0x8b, 8, 2 | 4 | 8 | 16, 0, 0, 0, 0, 0, 3, 2, 0, 9, 9][..],
            b"name\0comment\0",
        ]
        .concat();
        let sum = crc32fast::hash(&header) as u16;
        header.extend(sum.to_le_bytes());
        for len in 0..header.len() {
            assert_eq!(header_len(&header[..len]), Ok(None), "{len}");
        }
        assert_eq!(header_len(&[&header[..], b"body"].concat()), Ok(Some(header.len())));
        for at in [5, 12, 16, header.len() - 1] {
            let mut bad = header.clone();
            bad[at] ^= 1;
            assert!(header_len(&bad).is_err(), "{at}");
        }
        for wrong in [
            &b"PK"[..],
            &[0x1f, 0x8b, 7, 0, 0, 0, 0, 0, 0, 0],
            &[0x1f, 0x8b, 8, 0x80, 0, 0, 0, 0, 0, 0],
        ] {
            assert!(header_len(wrong).is_err());
        }
    }

    #[test]
    fn a_copy_goes_on_where_it_was_made() {
        let content: Vec<u8> =
            (0..300_000_u32).map(|at| (at.wrapping_mul(at) >> 9) as u8).collect();
        let member = |content: &[u8]| {
            let mut bytes = vec![0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3];
            bytes.extend(miniz_oxide::deflate::compress_to_vec(content, 6));
            bytes.extend(crc32fast::hash(content).to_le_bytes());
            bytes.extend((content.len() as u32).to_le_bytes());
            bytes
        };
        let mut file = member(&content[..123_456]);
        file.extend(member(&[]));
        file.extend(member(&content[123_456..]));
        let whole = file.len();
        file.extend([0; 100]);
        for piece in [1, 7, 4096, file.len()] {
            let mut copies = vec![Inflater::new()];
            let mut inflater = Inflater::new();
            let mut out = Vec::new();
            while inflater.taken < file.len() as u64 {
                let from = inflater.taken as usize;
                let until = inflater.made + 50_000;
                inflater.step(&file[from..file.len().min(from + piece)], until, &mut out).unwrap();
                if inflater.made > copies.last().unwrap().made + 40_000 {
                    copies.push(inflater.clone());
                }
            }
            inflater.finish().unwrap();
            assert!(out == content && copies.len() > 3);
            for mut copy in copies {
                let from = copy.made as usize;
                let mut rest = Vec::new();
                while copy.taken < file.len() as u64 {
                    copy.step(&file[copy.taken as usize..], u64::MAX, &mut rest).unwrap();
                }
                assert!(rest == content[from..]);
            }
        }
        let ends = |bytes: &[u8]| {
            let mut inflater = Inflater::new();
            inflater.step(bytes, u64::MAX, &mut Vec::new()).and_then(|()| inflater.finish())
        };
        assert!(ends(&file[..whole]).is_ok());
        for len in [0, 5, 30, whole - 1] {
            assert!(ends(&file[..len]).is_err(), "{len}");
        }
        for at in [0, 2, 40, whole - 1, whole - 6] {
            let mut bad = file.clone();
            bad[at] ^= 0x41;
            assert!(ends(&bad).is_err(), "{at}");
        }
    }
}
