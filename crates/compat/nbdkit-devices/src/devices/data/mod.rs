//! `data:TEXT`: bytes given literally, in the format of nbdkit's data plugin:
//!
//! - `0x55`, `85`, `0125`: one byte, in hexadecimal, decimal or octal; `le16:N` … `be64:N`: more
//! - `"text"`: its bytes, with the escapes of C (`\n`, `\x1b`, `\"` …)
//! - `@4k`, `@+4k`, `@-4k`, `@^512`: continue at this offset, so much further or back, or at the next
//!   multiple
//! - `( … )`: a group with offsets of its own; `X*N`: X N times; `X[N:M]`: bytes N up to M of X
//! - `<FILE`, `<(SCRIPT)`: the bytes of a file, and what a script prints
//! - `X -> \name`, `\name`: gives X a name until the group ends, and puts it in
//! - `$VAR`: a group with the text of an option or of a variable of the environment
//! - `# …`: a comment, to the end of the line
//!
//! A group overwrites its whole length. The device is as large as the data unless `size=` says
//! otherwise; it can be written, in memory.

mod item;
mod parse;
mod source;

use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::{Backend, Opened, Opening, Param, ParamKind, Target};

use blockhaul_backends::support::MemoryDevice;
use blockhaul_backends::support::{decode_base64, operand};
use item::{Item, unfold};

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
        "literal bytes, for example data:'\"boot\" @510 0x55 0xaa', in the format of nbdkit's data plugin; \
         options with other names are variables; kept in memory"
    }

    fn example(&self) -> &'static str {
        r#"
blockhaul copy 'data:"boot" @510 0x55 0xaa' boot.raw
"#
    }

    fn params(&self) -> &'static [Param] {
        const {
            &[
                Param {
                    name: "size",
                    kind: ParamKind::Size,
                    default: None,
                    doc: "Size of the device [default: the size of the data].",
                },
                Param {
                    name: "data",
                    kind: ParamKind::Text,
                    default: None,
                    doc: "The bytes, instead of those after the colon.",
                },
                Param {
                    name: "raw",
                    kind: ParamKind::Text,
                    default: None,
                    doc: "Bytes that are used as they are, instead of those after the colon.",
                },
                Param {
                    name: "base64",
                    kind: ParamKind::Text,
                    default: None,
                    doc: "Bytes in base64, instead of those after the colon.",
                },
            ]
        }
    }

    fn takes_others(&self) -> bool {
        true
    }

    fn open(&self, target: Target) -> Opening<Opened> {
        Box::pin(async move {
            // Reads files and runs scripts.
            let made = blockhaul_io::offload(move || make(&target)).await;
            let device = made.map_err(|_| Error::new(Kind::Io, "data: was not made"))??;
            Ok(Opened::from(Arc::new(device) as Arc<dyn Device>))
        })
    }
}

fn make(target: &Target) -> Result<MemoryDevice> {
    let args = &target.args;
    let variables = target.args.others();
    let behind = Some(target.text()?).filter(|text| !text.is_empty());
    let given = [behind, args.text("data"), args.text("raw"), args.text("base64")];
    if given.iter().flatten().count() > 1 {
        let text = "data: requires one of BYTES, data=, raw= and base64=";
        return Err(Error::new(Kind::Usage, text));
    }
    let literal = match given {
        [_, _, Some(raw), _] => Some(raw.as_bytes().to_vec()),
        [_, _, _, Some(text)] => Some(decode_base64(text)?),
        _ => None,
    };
    if let (Some(_), [(name, _), ..]) = (&literal, variables) {
        let text = format!("data: {name}= is a variable, which raw= and base64= do not use");
        return Err(Error::new(Kind::Usage, text));
    }
    let all = match literal {
        Some(bytes) => Arc::new(Item::bytes(bytes)),
        None => parse::parse(behind.or(args.text("data")).unwrap_or(""), variables)?,
    };
    let size = args.size("size").unwrap_or(all.len());
    unfold(&all, operand::name(target), size)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes that a description expands to.
    fn bytes(text: &str) -> Result<Vec<u8>> {
        let variables = [("hello", " \"Hello\" "), ("two", "$one*2"), ("one", "1 -> \\one \\one")];
        let variables = variables.map(|(key, text)| (key.to_string(), text.to_string()));
        let all = parse::parse(text, &variables)?;
        let device = unfold(&all, "data".into(), all.len())?;
        let mut bytes = vec![0xee; usize::try_from(all.len()).unwrap()];
        device.read_now(0, &mut bytes);
        Ok(bytes)
    }

    #[test]
    fn descriptions_unfold_to_their_bytes() {
        let cases: &[(&str, &[u8])] = &[
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
            (
                "le16:1 be16:0x102 le32:03 be64:4*2",
                &[1, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 4],
            ),
            ("\"Hello\"[3:5] \"Hello\"[:] (\"Hello\")[ 3: ]*2 \"Hello\"[:1]", b"loHellololoH"),
            ("\"Hello\"[99:99] 1", &[1]),
            ("((1 @3)*5)[4:8]", &[0, 0, 1, 0]),
            ("(1 2 3)*1T[4:8]", &[2, 3, 1, 2]),
            ("(7*1T)[1G:1073741826]", &[7, 7]),
            ("(\"abc\"*5)[1:6][1:4]", b"cab"),
            ("$hello[:4] $hello", b"HellHello"),
            ("$two", &[1, 1]),
            ("(0x31) -> \\a ((0x32)->\\a \\a (\\a) -> \\b 3 -> \\a \\b) \\a*2", b"2211"),
            ("<(printf 'a(b)'; printf c)*2 <(yes)[2:5]", b"a(b)ca(b)cy\ny"),
            ("(<(yes))[:3] -> \\y \\y", b"y\ny"),
            ("</dev/zero[:3] 1", &[0, 0, 0, 1]),
            ("(</dev/zero)[:1] -> \\z (</dev/zero) -> \\all \\z \\all[:1] 1", &[0, 0, 1]),
        ];
        for (text, expected) in cases {
            assert_eq!(bytes(text).unwrap(), *expected, "{text}");
        }
        let names = (1..60).map(|n| format!("(\\{} 1 \\{0}) -> \\{n} ", n - 1));
        let names = format!("1 -> \\0 {}", names.collect::<String>());
        assert_eq!(bytes(&format!("{names} \\3[2:]")).unwrap(), [1; 13]);
        assert!(bytes(&format!("{names} \\50")).is_err());
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
            ("(1", "without a )"),
            ("1)", "without a ("),
            ("\"abc", "without an end"),
            ("\"\\8\"", "unknown escape"),
            ("\"\\u20\"", "unknown escape"),
            ("\"\\777\"", "more than 255"),
            ("\"\\x\"", "two hexadecimal"),
            ("@", "not a size"),
            ("1 @-2", "before the start"),
            ("@^0", "aligned to 0"),
            ("*3", "must follow"),
            ("1*7e 1*7e", "2^63 - 1"),
            ("(1*1M)*1G", "256 MiB"),
            ("((1 @100)*1M)*1M", "256 MiB"),
            ("(((1 @100)*1M)*1M)[1:500M]", "256 MiB"),
            ("@08", "not a number"),
            ("le16:0x10000", "of 16 bits"),
            ("be32:-1", "of 32 bits"),
            ("le8:1", "le16:N"),
            ("1[2:]", "exceeds the item"),
            ("1[:2]", "exceeds the item"),
            ("(1 2)[2:1]", "exceeds the item"),
            ("(1 2)[1]", "[N:M]"),
            ("@4 [0:1]", "must follow"),
            ("\\a", "nothing has the name \\a"),
            ("(1 -> \\a) \\a", "nothing has the name"),
            ("1 -> \\a \\b", "nothing has the name"),
            ("-> \\a", "must follow"),
            ("1 - \\a", "followed by >"),
            ("1 -> a", "begins with \\"),
            ("<", "name of a file"),
            ("</no/such/file", "/no/such/file"),
            ("<(", "a <( without"),
            ("<(exit 1)", "failed: exit status: 1"),
            ("$", "name of a variable"),
            ("$1", "name of a variable"),
            ("$no_such_variable", "no variable no_such_variable"),
            ("1 $x", "at character 3, before \"x\" of $x"),
            ("$loop", "nested too deeply"),
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
        let variables = [("loop".into(), "$loop".into()), ("x".into(), "1 x".into())];
        let all = parse::parse(text, &variables);
        let device = all.and_then(|all| unfold(&all, "data".into(), all.len()));
        device.err().unwrap().to_string()
    }

    #[test]
    fn a_device_may_be_smaller_or_larger_than_its_data() {
        let all = parse::parse("1*10", &[]).unwrap();
        let mut read = [9; 4];
        unfold(&all, "data".into(), 4).unwrap().read_now(0, &mut read);
        assert_eq!(read, [1; 4]);
        unfold(&all, "data".into(), 100).unwrap().read_now(8, &mut read);
        assert_eq!(read, [1, 1, 0, 0]);
    }

    #[test]
    fn nothing_that_is_typed_ends_the_program() {
        // Without files and scripts, which would be read as well.
        let words = [
            "(",
            ")",
            "@",
            "+",
            "-",
            "^",
            "*",
            "[",
            "]",
            ":",
            "->",
            "\\a",
            "\\",
            "$hello",
            "\"",
            "#",
            "\n",
            " ",
            "0",
            "1",
            "0x",
            "18446744073709551615",
            "9223372036854775807",
            "8E",
            "le64:",
            "be16:",
            "\\x",
            "é",
            "*2",
            "[1:]",
            "[:5]",
            "(1 2)",
            "@1",
            "1 -> \\a",
        ];
        let seed = blockhaul_testkit::rng::seed();
        let mut rng = blockhaul_testkit::rng::Rng::new(seed);
        let variables = [("hello".to_string(), "1 $hello".to_string())];
        let mut accepted = 0;
        for _ in 0..20_000 {
            let count = rng.between(1, 12);
            let text: String = (0..count).map(|_| *rng.pick(&words)).collect();
            let made = parse::parse(&text, &variables);
            let size = rng.below(1 << 20);
            accepted += u32::from(made.and_then(|all| unfold(&all, text.clone(), size)).is_ok());
        }
        assert!(accepted > 100, "{accepted}");
    }
}
