//! `data:TEXT`: bytes given literally, in a part of the format of nbdkit's data plugin:
//!
//! - `0x55`, `85`, `0125`: one byte, in hexadecimal, decimal or octal
//! - `base64:TEXT`: the bytes that it encodes
//! - `"text"`: its bytes, with the escapes of C (`\n`, `\x1b`, `\"` …)
//! - `<FILE`: the bytes of a file
//! - `X*N`: X N times
//! - `@4k`, `@+4k`, `@-4k`, `@^512`: continue at this offset, so much further or back, or at the next
//!   multiple
//! - `# …`: a comment, to the end of the line
//!
//! The device is as large as the data unless `size=` says otherwise; it can be written, in memory.

mod image;
mod parse;

use std::sync::Arc;

use blockhaul_block::{Device, Error, Kind, Result};
use blockhaul_catalog::{Backend, BackendTarget, OpenFuture, OpenedDevice, Param, ParamKind};

use blockhaul_backends::support::MemoryDevice;
use blockhaul_backends::support::{decode_base64, operand};
use image::DataImage;

/// The backend `data:TEXT`.
pub struct DataBackend;

impl Backend for DataBackend {
    fn schemes(&self) -> &'static [&'static str] {
        &["data"]
    }

    fn operand(&self) -> &'static str {
        "BYTES"
    }

    fn summary(&self) -> &'static str {
        "literal bytes, for example data:'\"boot\" @510 0x55 0xaa', files and repetitions, as in nbdkit's \
         data plugin; kept in memory"
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

    fn open(&self, target: BackendTarget) -> OpenFuture<OpenedDevice> {
        Box::pin(async move {
            // Reads files and runs scripts.
            let made = blockhaul_io::offload(move || make(&target)).await;
            let device = made.map_err(|_| Error::new(Kind::Io, "data: was not made"))??;
            Ok(OpenedDevice::from(Arc::new(device) as Arc<dyn Device>))
        })
    }
}

fn make(target: &BackendTarget) -> Result<MemoryDevice> {
    let args = &target.args;
    if let [(name, _), ..] = args.others() {
        let text = format!("data: {name}= is no option, and variables are not supported");
        return Err(Error::new(Kind::Usage, text).with_remedy(parse::PLUGIN));
    }
    let behind = Some(target.text()?).filter(|text| !text.is_empty());
    let given = [behind, args.text("data"), args.text("raw"), args.text("base64")];
    if given.iter().flatten().count() > 1 {
        let text = "data: requires one of BYTES, data=, raw= and base64=";
        return Err(Error::new(Kind::Usage, text));
    }
    let mut image = DataImage::default();
    match given {
        [_, _, Some(raw), _] => image.push(raw.as_bytes().to_vec(), 1)?,
        [_, _, _, Some(text)] => image.push(decode_base64(text)?, 1)?,
        [text, data, ..] => image = parse::parse(text.or(data).unwrap_or(""))?,
    }
    let size = args.size("size").unwrap_or(image.len());
    image.device(operand::name(target), size)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes of a description.
    fn bytes(text: &str) -> Result<Vec<u8>> {
        let image = parse::parse(text)?;
        let device = image.device("data".into(), image.len())?;
        let mut bytes = vec![0xee; usize::try_from(image.len()).unwrap()];
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
            ("\"ab\" * 2 * 2", b"abababab"),
            ("5*4 @1 0*2", &[5, 0, 0, 5]),
            ("5 6 7 @1 8", &[5, 8, 7]),
            ("1 # one\n2#two", &[1, 2]),
            ("1*0 2", &[2]),
            ("\"\"*7E 1", &[1]),
            ("</dev/null 1", &[1]),
            ("base64:AAEC*2 3 base64:/w==", &[0, 1, 2, 0, 1, 2, 3, 255]),
        ];
        for (text, expected) in cases {
            assert_eq!(bytes(text).unwrap(), *expected, "{text}");
        }
        assert_eq!(bytes("0*1M 1").unwrap().len(), (1 << 20) + 1);
        let odd = bytes("\"abc\"*100k").unwrap();
        assert_eq!(odd.len(), 300 << 10);
        assert!(odd.chunks(3).all(|chunk| chunk == b"abc"));
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        assert_eq!(bytes(&format!("<{file}*2")).unwrap(), std::fs::read(file).unwrap().repeat(2));
    }

    #[test]
    fn mistakes_are_told_with_their_place() {
        let cases = [
            ("256", "not a byte"),
            ("0xzz", "not a byte"),
            ("08", "not a byte"),
            ("x", "not understood"),
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
            ("\"abcd\"*1M*1G", "256 MiB"),
            ("@08", "not a number"),
            ("<", "name of a file"),
            ("</no/such/file", "/no/such/file"),
            ("</dev/zero", "256 MiB"),
            ("(1 2)*2", "groups"),
            ("1)", "groups"),
            ("\"abc\"[1:]", "slices"),
            ("1 -> \\a", "names"),
            ("\\a", "names"),
            ("$x", "variables"),
            ("<(echo 1)", "scripts"),
            ("le16:1", "numbers"),
            ("base64 AAEC", "numbers"),
            ("base64:A", "base64"),
        ];
        for (text, part) in cases {
            let error = bytes(text).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        let error = bytes("1 (2)").unwrap_err().to_string();
        let place = "data: at character 3, before \"(2)\": groups, ( … ), are not supported; use nbdkit's \
                     plugin";
        assert!(error.starts_with(place), "{error}");
        let error = bytes(&format!("1{}", "*2".repeat(1000))).unwrap_err().to_string();
        assert!(error.contains("2^63 - 1"), "{error}");
    }

    #[test]
    fn a_device_may_be_smaller_or_larger_than_its_data() {
        let image = parse::parse("1*10 @100 2").unwrap();
        let mut read = [9; 4];
        image.device("data".into(), 4).unwrap().read_now(0, &mut read);
        assert_eq!(read, [1; 4]);
        image.device("data".into(), 100).unwrap().read_now(8, &mut read);
        assert_eq!(read, [1, 1, 0, 0]);
    }

    #[test]
    fn nothing_that_is_typed_ends_the_program() {
        // Without files, which would be read as well.
        let words = "( @ + - ^ * [ -> \\ $ \" # 0 1 0x 18446744073709551615 9223372036854775807 8E le64: \
                     \\x é *2 @1 \"ab\"";
        let words: Vec<&str> = words.split(' ').chain([" ", "\n"]).collect();
        let seed = blockhaul_testkit::rng::seed();
        let mut rng = blockhaul_testkit::rng::Rng::new(seed);
        let mut accepted = 0;
        for _ in 0..20_000 {
            let count = rng.between(1, 12);
            let text: String = (0..count).map(|_| *rng.pick(&words)).collect();
            let size = rng.below(1 << 20);
            let device = parse::parse(&text).and_then(|image| image.device(text.clone(), size));
            accepted += u32::from(device.is_ok());
        }
        assert!(accepted > 100, "{accepted}");
    }
}
