//! Lists the numbers that the codes of 8-bit moments stand for, as shares of the absolute maximum of a block. The list
//! of the numbers of all codes is a dynamic map.
//!
//! A map has 0, 1 and seven decades below 1. Each decade has twice as many numbers as the decade below it, at equal
//! distances. The signed map also has the negatives of the decades. The numbers have the bits of `bitsandbytes`. These
//! bits depend on how torch rounds, so this file lists the numbers. docs/store-format.md says how to compute them.

/// The positive half of the signed map, from code 128 on. Code 127 stands for 0. Code 127 - i stands for minus the
/// number of code 127 + i. The last code, 255, stands for 1, and no code stands for -1.
#[rustfmt::skip]
const SIGNED: [u32; 128] = [
    0x3513_A3B7, 0x365A_1A94, 0x3702_05FF, 0x37B2_4206, 0x3837_8034, 0x388A_EFB3, 0x38BA_1F4B, 0x3923_D70B, 0x398C_E705,
    0x39C7_E283, 0x3A01_6F01, 0x3A1E_ECC1, 0x3A3C_6A80, 0x3A59_E83E, 0x3A77_65FF, 0x3AA7_EF9D, 0x3AF1_A9FC, 0x3B1D_B22D,
    0x3B42_8F5C, 0x3B67_6C8A, 0x3B86_24DD, 0x3B98_9374, 0x3BAB_020D, 0x3BBD_70A4, 0x3BCF_DF3B, 0x3BE2_4DD3, 0x3BF4_BC6A,
    0x3C03_9581, 0x3C0C_CCCD, 0x3C16_0418, 0x3C1F_3B64, 0x3C3A_E148, 0x3C68_F5C3, 0x3C8B_851F, 0x3CA2_8F5D, 0x3CB9_999A,
    0x3CD0_A3D7, 0x3CE7_AE15, 0x3CFE_B852, 0x3D0A_E148, 0x3D16_6667, 0x3D21_EB85, 0x3D2D_70A3, 0x3D38_F5C3, 0x3D44_7AE1,
    0x3D50_0000, 0x3D5B_851F, 0x3D67_0A3D, 0x3D72_8F5D, 0x3D7E_147B, 0x3D84_CCCD, 0x3D8A_8F5D, 0x3D90_51EB, 0x3D96_147B,
    0x3D9B_D70A, 0x3DA1_999A, 0x3DA7_5C2A, 0x3DAD_1EB8, 0x3DB2_E148, 0x3DB8_A3D7, 0x3DBE_6667, 0x3DC4_28F7, 0x3DC9_EB85,
    0x3DDB_3334, 0x3DF8_0000, 0x3E0A_6666, 0x3E18_CCCD, 0x3E27_3333, 0x3E35_999A, 0x3E44_0000, 0x3E52_6666, 0x3E60_CCCD,
    0x3E6F_3333, 0x3E7D_9999, 0x3E86_0000, 0x3E8D_3334, 0x3E94_6666, 0x3E9B_999A, 0x3EA2_CCCC, 0x3EAA_0000, 0x3EB1_3333,
    0x3EB8_6666, 0x3EBF_999A, 0x3EC6_CCCC, 0x3ECE_0000, 0x3ED5_3333, 0x3EDC_6666, 0x3EE3_999A, 0x3EEA_CCCC, 0x3EF2_0000,
    0x3EF9_3332, 0x3F00_3333, 0x3F03_CCCC, 0x3F07_6666, 0x3F0B_0000, 0x3F0E_999A, 0x3F12_3334, 0x3F15_CCCD, 0x3F19_6666,
    0x3F1D_0000, 0x3F20_999A, 0x3F24_3334, 0x3F27_CCCD, 0x3F2B_6666, 0x3F2F_0000, 0x3F32_999A, 0x3F36_3334, 0x3F39_CCCD,
    0x3F3D_6666, 0x3F41_0000, 0x3F44_999A, 0x3F48_3333, 0x3F4B_CCCD, 0x3F4F_6666, 0x3F53_0000, 0x3F56_999A, 0x3F5A_3333,
    0x3F5D_CCCD, 0x3F61_6666, 0x3F65_0000, 0x3F68_999A, 0x3F6C_3333, 0x3F6F_CCCD, 0x3F73_6666, 0x3F77_0000, 0x3F7A_999A,
    0x3F7E_3333, 0x3F80_0000,
];

#[rustfmt::skip]
const UNSIGNED: [u32; 256] = [
    0x0000_0000, 0x34AE_7BAA, 0x3550_0998, 0x360E_9B38, 0x3692_CCF6, 0x36DE_4C51, 0x3714_E5D5, 0x3783_126E, 0x37E1_71A0,
    0x381F_E868, 0x384F_1800, 0x387E_479A, 0x3896_BB99, 0x38AE_5364, 0x38C5_EB31, 0x3906_594B, 0x3941_54CA, 0x397C_5049,
    0x399B_A5E4, 0x39B9_23A2, 0x39D6_A163, 0x39F4_1F22, 0x3A08_CE71, 0x3A17_8D50, 0x3A26_4C30, 0x3A35_0B10, 0x3A43_C9EF,
    0x3A52_88D0, 0x3A61_47AF, 0x3A70_068E, 0x3A7E_C56E, 0x3A95_8106, 0x3ABA_5E35, 0x3ADF_3B64, 0x3B02_0C4A, 0x3B14_7AE1,
    0x3B26_E978, 0x3B39_5810, 0x3B4B_C6A7, 0x3B5E_3540, 0x3B70_A3D7, 0x3B81_8937, 0x3B8A_C082, 0x3B93_F7CF, 0x3B9D_2F1A,
    0x3BA6_6666, 0x3BAF_9DB2, 0x3BB8_D4FD, 0x3BC2_0C4A, 0x3BCB_4395, 0x3BD4_7AE1, 0x3BDD_B22E, 0x3BE6_E978, 0x3BF0_20C5,
    0x3BF9_580F, 0x3C01_47AE, 0x3C05_E354, 0x3C0A_7EF9, 0x3C0F_1AA0, 0x3C13_B645, 0x3C18_51EB, 0x3C1C_ED92, 0x3C21_8937,
    0x3C2F_5C2A, 0x3C46_6667, 0x3C5D_70A3, 0x3C74_7AE2, 0x3C85_C28F, 0x3C91_47AF, 0x3C9C_CCCD, 0x3CA8_51EB, 0x3CB3_D70B,
    0x3CBF_5C29, 0x3CCA_E147, 0x3CD6_6667, 0x3CE1_EB87, 0x3CED_70A3, 0x3CF8_F5C3, 0x3D02_3D70, 0x3D08_0000, 0x3D0D_C28F,
    0x3D13_851F, 0x3D19_47AF, 0x3D1F_0A3D, 0x3D24_CCCD, 0x3D2A_8F5C, 0x3D30_51EB, 0x3D36_147B, 0x3D3B_D70A, 0x3D41_999A,
    0x3D47_5C28, 0x3D4D_1EB8, 0x3D52_E147, 0x3D58_A3D7, 0x3D5E_6667, 0x3D64_28F7, 0x3D69_EB87, 0x3D6F_AE15, 0x3D75_70A3,
    0x3D7B_3333, 0x3D80_7AE2, 0x3D83_5C2A, 0x3D86_3D71, 0x3D89_1EB8, 0x3D8C_0000, 0x3D8E_E148, 0x3D91_C290, 0x3D94_A3D7,
    0x3D97_851F, 0x3D9A_6667, 0x3D9D_47AF, 0x3DA0_28F6, 0x3DA3_0A3E, 0x3DA5_EB85, 0x3DA8_CCCD, 0x3DAB_AE15, 0x3DAE_8F5C,
    0x3DB1_70A4, 0x3DB4_51EB, 0x3DB7_3333, 0x3DBA_147B, 0x3DBC_F5C3, 0x3DBF_D70B, 0x3DC2_B852, 0x3DC5_999A, 0x3DC8_7AE2,
    0x3DCB_5C29, 0x3DD4_0000, 0x3DE2_6666, 0x3DF0_CCCD, 0x3DFF_3333, 0x3E06_CCCC, 0x3E0E_0000, 0x3E15_3334, 0x3E1C_6666,
    0x3E23_999A, 0x3E2A_CCCC, 0x3E32_0000, 0x3E39_3334, 0x3E40_6666, 0x3E47_999A, 0x3E4E_CCCC, 0x3E56_0000, 0x3E5D_3334,
    0x3E64_6666, 0x3E6B_999A, 0x3E72_CCCC, 0x3E7A_0000, 0x3E80_9999, 0x3E84_3333, 0x3E87_CCCD, 0x3E8B_6666, 0x3E8F_0000,
    0x3E92_999A, 0x3E96_3333, 0x3E99_CCCC, 0x3E9D_6666, 0x3EA1_0000, 0x3EA4_999A, 0x3EA8_3333, 0x3EAB_CCCC, 0x3EAF_6666,
    0x3EB3_0000, 0x3EB6_999A, 0x3EBA_3333, 0x3EBD_CCCC, 0x3EC1_6666, 0x3EC5_0000, 0x3EC8_999A, 0x3ECC_3333, 0x3ECF_CCCC,
    0x3ED3_6666, 0x3ED7_0000, 0x3EDA_999A, 0x3EDE_3333, 0x3EE1_CCCC, 0x3EE5_6666, 0x3EE9_0000, 0x3EEC_999A, 0x3EF0_3333,
    0x3EF3_CCCC, 0x3EF7_6666, 0x3EFB_0000, 0x3EFE_9999, 0x3F01_199A, 0x3F02_E666, 0x3F04_B333, 0x3F06_8000, 0x3F08_4CCC,
    0x3F0A_199A, 0x3F0B_E666, 0x3F0D_B334, 0x3F0F_8000, 0x3F11_4CCD, 0x3F13_199A, 0x3F14_E666, 0x3F16_B334, 0x3F18_8000,
    0x3F1A_4CCD, 0x3F1C_199A, 0x3F1D_E666, 0x3F1F_B334, 0x3F21_8000, 0x3F23_4CCD, 0x3F25_199A, 0x3F26_E666, 0x3F28_B334,
    0x3F2A_8000, 0x3F2C_4CCD, 0x3F2E_199A, 0x3F2F_E666, 0x3F31_B334, 0x3F33_8000, 0x3F35_4CCD, 0x3F37_199A, 0x3F38_E666,
    0x3F3A_B334, 0x3F3C_8000, 0x3F3E_4CCD, 0x3F40_199A, 0x3F41_E666, 0x3F43_B334, 0x3F45_8000, 0x3F47_4CCC, 0x3F49_199A,
    0x3F4A_E666, 0x3F4C_B334, 0x3F4E_8000, 0x3F50_4CCC, 0x3F52_199A, 0x3F53_E666, 0x3F55_B334, 0x3F57_8000, 0x3F59_4CCC,
    0x3F5B_199A, 0x3F5C_E666, 0x3F5E_B334, 0x3F60_8000, 0x3F62_4CCC, 0x3F64_199A, 0x3F65_E666, 0x3F67_B334, 0x3F69_8000,
    0x3F6B_4CCC, 0x3F6D_199A, 0x3F6E_E666, 0x3F70_B334, 0x3F72_8000, 0x3F74_4CCC, 0x3F76_199A, 0x3F77_E666, 0x3F79_B334,
    0x3F7B_8000, 0x3F7D_4CCC, 0x3F7F_199A, 0x3F80_0000,
];

/// The map of first moments and of momentum.
pub(crate) static SIGNED_MAP: [f32; 256] = signed();
/// The map of second moments.
pub(crate) static UNSIGNED_MAP: [f32; 256] = unsigned();

const fn signed() -> [f32; 256] {
    let mut map = [0.0; 256];
    let mut index = 0;
    while index < 128 {
        map[128 + index] = f32::from_bits(SIGNED[index]);
        if index < 127 {
            map[126 - index] = -f32::from_bits(SIGNED[index]);
        }
        index += 1;
    }
    map
}

const fn unsigned() -> [f32; 256] {
    let mut map = [0.0; 256];
    let mut index = 0;
    while index < 256 {
        map[index] = f32::from_bits(UNSIGNED[index]);
        index += 1;
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes a map in float64, by its definition. The maps of this file differ from the result by some units in the
    /// last place, because torch rounds intermediate results.
    fn defined(first_items: u32) -> Vec<f64> {
        let decade = |exponent: i32| {
            let items = first_items << exponent;
            let middle = move |item: u32| 0.1 + 0.9 * (f64::from(item) + 0.5) / f64::from(items);
            (0..items).map(move |item| middle(item) * 10_f64.powi(exponent - 6))
        };
        (0..7).flat_map(decade).chain([1.0]).collect()
    }

    /// Computes a map by the recipe of docs/store-format.md, which gives the exact bits.
    fn recipe(first_items: u16) -> Vec<u32> {
        let decade = |exponent: u8| {
            let items = first_items << exponent;
            let step = (1.0 - 0.1_f32) / f32::from(items);
            let edge = move |item: u16| {
                if item < items.div_ceil(2) {
                    step.mul_add(f32::from(item), 0.1)
                } else {
                    (-step).mul_add(f32::from(items - item), 1.0)
                }
            };
            let scale = [1e-6_f32, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0][usize::from(exponent)];
            (0..items).map(move |item| (f32::midpoint(edge(item), edge(item + 1)) * scale).to_bits())
        };
        (0..7).flat_map(decade).chain([1.0_f32.to_bits()]).collect()
    }

    #[test]
    fn maps_have_the_bits_of_the_documented_recipe() {
        assert_eq!(recipe(1), SIGNED_MAP[128..].iter().map(|number| number.to_bits()).collect::<Vec<_>>());
        assert_eq!(recipe(2), UNSIGNED_MAP[1..].iter().map(|number| number.to_bits()).collect::<Vec<_>>());
    }

    #[test]
    fn maps_are_sorted_symmetric_and_near_their_definition() {
        let near = |map: &[f32], defined: &[f64]| {
            assert_eq!(map.len(), defined.len());
            let close = |(&found, &wanted): (&f32, &f64)| (f64::from(found) - wanted).abs() <= 4e-7 * wanted;
            assert!(map.iter().zip(defined).all(close), "{map:?}");
        };
        near(&SIGNED_MAP[128..], &defined(1));
        near(&UNSIGNED_MAP[1..], &defined(2));
        assert_eq!((SIGNED_MAP[127].to_bits(), UNSIGNED_MAP[0].to_bits()), (0, 0));
        assert!((0..127).all(|code| SIGNED_MAP[code].to_bits() == (-SIGNED_MAP[254 - code]).to_bits()));
        for map in [SIGNED_MAP, UNSIGNED_MAP] {
            assert!(map.windows(2).all(|pair| pair[0] < pair[1]));
        }
    }
}
