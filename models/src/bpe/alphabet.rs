//! GPT-2's printable alphabet for bytes.

use std::collections::HashMap;

/// Printable Latin-1 stands for itself, the other 68 bytes are U+0100 and on, in their order.
pub(crate) fn byte_alphabet() -> HashMap<char, u8> {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let shown = (0..=255u8).filter(printable).map(|byte| (char::from(byte), byte));
    let hidden = (0..=255u8).filter(|byte| !printable(byte));
    shown.chain(('\u{100}'..).zip(hidden)).collect()
}
