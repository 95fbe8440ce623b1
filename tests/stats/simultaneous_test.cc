#include "stats/simultaneous.h"

#include <gtest/gtest.h>

#include <cmath>

#include "stats/student.h"

namespace assay::stats {
namespace {

constexpr size_t kDraws = 4096;

// Members with own seeds of variance `own` and a shared reference of variance `shared`.
Family family(size_t members, double own, double shared, double freedom, double documents = 0,
              double link = 0) {
  Family family;
  family.freedom = {freedom, freedom};
  family.document_link.assign(members, std::vector<double>(members, link));
  for (size_t a = 0; a < members; ++a) {
    family.document_link[a][a] = 1;
    Member& member = family.members.emplace_back();
    member.seeds = {{0, 0, -std::sqrt(shared)}, {a + 1, 1, std::sqrt(own)}};
    member.documents = {documents, 50};
  }
  return family;
}

TEST(Simultaneous, OneMemberIsNotWidened) {
  EXPECT_EQ(simultaneous_factor(family(1, 1, 1, 10), 0.95, kDraws), 1);
}

TEST(Simultaneous, IndependentMembersGiveTheSidakFactor) {
  const double sidak = student_quantile(std::pow(0.95, 0.1), 1e6) / student_quantile(0.95, 1e6);
  EXPECT_NEAR(simultaneous_factor(family(10, 1, 0, 1e6), 0.95, kDraws), sidak, 0.03);
}

TEST(Simultaneous, EqualSharesGiveDunnettsFactor) {
  // Dunnett's two-sided 95 % point for 4 treatments, correlation 1/2, infinite freedom: 2.44.
  EXPECT_NEAR(simultaneous_factor(family(4, 1, 1, 1e6), 0.95, kDraws), 2.44 / 1.96, 0.03);
}

TEST(Simultaneous, MembersThatMoveTogetherAreHardlyWidened) {
  EXPECT_LT(simultaneous_factor(family(10, 1e-6, 1, 1e6), 0.95, kDraws), 1.03);
  EXPECT_LT(simultaneous_factor(family(10, 1e-6, 0, 1e6, 1, 0.9999), 0.95, kDraws), 1.05);
}

TEST(Simultaneous, FewDegreesOfFreedomTakeMoreDraws) {
  // With 256 draws its standard error is about 10 %, with 65,536 about 0.7 %.
  const Family few = family(5, 1, 0.05, 1);
  const double exact = simultaneous_factor(few, 0.95, 262'144);
  EXPECT_NEAR(simultaneous_factor(few, 0.95, kDraws), exact, 0.02 * exact);
}

TEST(Simultaneous, SourcesOfOneEstimatorAddUpBeforeSatterthwaite) {
  const Member member{{{0, 0, 1}, {1, 0, 2}, {2, 1, 1}}, {}};
  const Variance seeds = seed_variance(member, {4, 2});
  EXPECT_DOUBLE_EQ(seeds.value, 6);
  EXPECT_DOUBLE_EQ(seeds.freedom, 36 / (25.0 / 4 + 1.0 / 2));
}

}  // namespace
}  // namespace assay::stats
