//! Sizes in bytes as text.

use blockhaul_catalog::format_size;

/// A size, with a shorter form in parentheses if there is one.
pub(crate) fn with_unit(size: u64) -> String {
    let short = format_size(size);
    if short == size.to_string() { short } else { format!("{size} ({short})") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_a_unit_where_it_is_exact() {
        assert_eq!(with_unit(8 << 20), "8388608 (8M)");
        assert_eq!(with_unit(1000), "1000");
        assert_eq!(with_unit(0), "0");
    }
}
