//! Random irreducible polynomials over the field of two elements, by which restic's chunker of files works.

use openssl::error::ErrorStack;
use openssl::rand::rand_bytes;

/// The degree, which is prime.
const DEGREE: u32 = 53;

/// A random irreducible polynomial of degree 53: bit N is the coefficient of the power N.
///
/// # Errors
/// No random bytes are left.
pub(crate) fn random() -> Result<u64, ErrorStack> {
    loop {
        let mut bytes = [0; 8];
        rand_bytes(&mut bytes)?;
        // One in 53 is irreducible, or in 27 of those with a constant.
        let candidate = u64::from_le_bytes(bytes) & ((1 << DEGREE) - 1) | 1 << DEGREE | 1;
        if is_irreducible(candidate) {
            return Ok(candidate);
        }
    }
}

/// Rabin's test. As the degree is prime, a polynomial is irreducible if it divides `x^(2^53) - x` and has no root.
fn is_irreducible(polynomial: u64) -> bool {
    let has_root = polynomial & 1 == 0 || polynomial.count_ones().is_multiple_of(2);
    let power = (0..DEGREE).fold(2, |power, _| square(power, polynomial));
    !has_root && power == 2
}

/// The square of a polynomial of a degree below 53, modulo one of degree 53.
fn square(factor: u64, modulus: u64) -> u64 {
    (0..DEGREE).rev().fold(0, |product, bit| {
        let doubled = product << 1;
        let reduced = if doubled >> DEGREE == 0 { doubled } else { doubled ^ modulus };
        if factor >> bit & 1 == 0 { reduced } else { reduced ^ factor }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polynomials_of_restic_are_irreducible_and_products_are_not() {
        // Of repositories that restic has made.
        for good in [0x36_6b96_62f3_3e55, 0x3D_A335_8B4D_C173] {
            assert!(is_irreducible(good), "{good:x}");
        }
        // (x + 1) times one of degree 52, and one without a constant.
        assert!(!is_irreducible((1 << 52 | 1) ^ (1 << 52 | 1) << 1));
        assert!(!is_irreducible(1 << 53 | 2));
        // x^53 + x^2 + 1 = (x^3 + x + 1) * …: 53 and 2 have the same powers modulo 7 as 4 and 2.
        assert!(!is_irreducible(1 << 53 | 0b101 ^ 0b100 ^ 0b10));
        assert_eq!(random().unwrap() >> DEGREE, 1);
    }
}
