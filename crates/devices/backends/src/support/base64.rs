//! Bytes as text in base64.

use blockhaul_block::{Error, Kind, Result};

/// Decodes base64 (RFC 4648, section 4), ignoring white space.
///
/// # Errors
/// [`Kind::Usage`] if the text has another symbol, is cut off, or goes on after its end.
pub fn decode_base64(text: &str) -> Result<Vec<u8>> {
    let wrong = |what: &str| Error::new(Kind::Usage, format!("base64: {what}"));
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let mut bits = 0_u32;
    let mut count = 0;
    let mut padding = 0;
    for symbol in text.bytes().filter(|byte| !byte.is_ascii_whitespace()) {
        let value = match symbol {
            b'A'..=b'Z' => symbol - b'A',
            b'a'..=b'z' => symbol - b'a' + 26,
            b'0'..=b'9' => symbol - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            b'=' => {
                padding += 1;
                0
            }
            _ => {
                return Err(wrong(&format!("{:?} is not a base64 symbol", char::from(symbol))));
            }
        };
        if padding > 0 && symbol != b'=' {
            return Err(wrong("continues after its end (=)"));
        }
        bits = bits << 6 | u32::from(value);
        count += 1;
        if count % 4 == 0 {
            bytes.extend_from_slice(&bits.to_be_bytes()[1..]);
            bits = 0;
        }
    }
    if count % 4 != 0 {
        let text = "the base64 text is cut off (its length is not a multiple of 4)";
        return Err(Error::new(Kind::Usage, text));
    }
    if padding > 2 || padding > bytes.len() {
        return Err(wrong("has too many = at its end"));
    }
    bytes.truncate(bytes.len() - padding);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_decoded() {
        let cases: [(&str, &[u8]); 6] = [
            ("", b""),
            ("MTIz", b"123"),
            ("MTIzNA==", b"1234"),
            ("MTIz\nNDU=", b"12345"),
            ("/+8A", &[255, 239, 0]),
            ("aGVsbG8gbmJka2l0IHVzZXI=", b"hello nbdkit user"),
        ];
        for (text, expected) in cases {
            assert_eq!(decode_base64(text).unwrap(), expected, "{text}");
        }
        for bad in ["M", "MT", "MTI", "MTIz=", "====", "M===", "MT==IzIz", "M-Iz", "é==="] {
            assert!(decode_base64(bad).is_err(), "{bad}");
        }
    }
}
